#pragma once
// Cache of measured profiles between runs.
#include <filesystem>

#include "core/device/device.hpp"
#include "scheduler/machine/profile.hpp"

namespace tandem {

/// File in which the profile of a device is kept between runs: $XDG_CACHE_HOME/tandem, else ~/.cache/tandem; one file
/// for each device and set of threads. Empty where there is no home.
std::filesystem::path cached_profile_path(const Device& device);
/// Writes the cache, whole or not at all. Throws WriteError.
void cache_profile(const MachineProfile& profile, const std::filesystem::path& file);

}  // namespace tandem
