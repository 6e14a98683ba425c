#include "cli/common/shipped_profiles.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "core/base/error.hpp"

namespace tandem {

namespace {

namespace fs = std::filesystem;

std::string shipped_names() {
  std::string names;
  for (const ShippedProfile& profile : shipped_profiles())
    names += fmt::format("{}{}", names.empty() ? "" : ", ", profile.name);
  return names;
}

MachineProfile profile_of_file(const fs::path& file) {
  std::error_code ignored;
  const std::string what = fmt::format("--profile {}", file.string());
  if (!fs::exists(file, ignored)) {
    throw InputError(what, "there is no such file",
                     fmt::format("name one that calibrate --out has written, or one of {}", shipped_names()));
  }
  try {
    return read_profile(file);
  } catch (const InputError& error) {
    throw InputError(what, error.what(), "name the file of a profile");
  } catch (const UsageError& error) {
    throw UsageError(what, error.what(), "calibrate --out FILE writes a profile");
  }
}

}  // namespace

MachineProfile find_profile(const std::string& name) {
  std::error_code ignored;
  const bool is_path = name.find('/') != std::string::npos || name.ends_with(".toml");
  if (is_path || fs::is_regular_file(name, ignored)) return profile_of_file(name);
  const auto shipped = shipped_profiles();
  const auto found = std::ranges::find(shipped, name, &ShippedProfile::name);
  if (found != shipped.end()) return parse_profile(found->toml, name);
  if (fs::exists(name, ignored)) return profile_of_file(name);
  throw UsageError(fmt::format("--profile {}", name), "neither a file nor a profile that tandem brings along",
                   fmt::format("those are {}", shipped_names()));
}

void add_profile_option(CLI::App& command, std::string& profile, const std::string& help) {
  command.add_option("--profile", profile, help)->type_name("FILE")->check([](const std::string& name) {
    return name.empty() ? std::string("an empty name; leave the flag out for this machine") : std::string();
  });
}

}  // namespace tandem
