#pragma once
// Profiles of machines that come with the program, found by name.
#include <CLI/CLI.hpp>
#include <span>
#include <string>
#include <string_view>

#include "scheduler/machine/profile.hpp"

namespace tandem {

/// A file of profiles/, embedded when tandem is built.
struct ShippedProfile {
  std::string_view name;  ///< without ".toml"
  std::string_view toml;
};

/// All of them, by name.
std::span<const ShippedProfile> shipped_profiles() noexcept;

/// The profile that --profile names: a file, or one of those shipped. Throws UsageError that lists these where a name
/// is neither, and where a file is no profile; InputError where a path names no file, or one that cannot be read.
MachineProfile find_profile(const std::string& name);

/// Adds --profile, which takes what find_profile takes.
void add_profile_option(CLI::App& command, std::string& profile, const std::string& help);

}  // namespace tandem
