#pragma once
// Limits that control groups put on this process: what a container may really use. Internal to core.
#include <cstddef>
#include <filesystem>
#include <optional>

namespace tandem {

/// Empty where no group sets a limit, or where nothing can be read.
struct CgroupLimits {
  std::optional<std::size_t> memory_limit;  ///< bytes, the lowest over the group and its ancestors
  std::optional<std::size_t> memory_room;   ///< bytes that may still be taken below every limit
  std::optional<double> cpus;               ///< processor time a second, by quota
};

/// Reads version 1 and 2 hierarchies below `root` (proc and the mounted groups; "/" but in tests).
/// Does not throw on missing or malformed files.
CgroupLimits read_cgroup_limits(const std::filesystem::path& root);

}  // namespace tandem
