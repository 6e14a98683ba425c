#include "core/host/cgroup.hpp"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <fstream>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

namespace tandem {
namespace {

namespace fs = std::filesystem;

std::optional<std::string> first_line(const fs::path& file) {
  std::ifstream in(file);
  std::string line;
  if (!std::getline(in, line)) return std::nullopt;
  return line;
}

/// "max", -1 and values beyond any machine mean no limit.
std::optional<std::size_t> number(std::string_view text) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  constexpr std::uint64_t beyond_any_machine = std::uint64_t{1} << 60;
  if (error != std::errc() || end == text.data() || value >= beyond_any_machine) return std::nullopt;
  return static_cast<std::size_t>(value);
}

std::optional<std::size_t> number_in(const fs::path& file) {
  const auto line = first_line(file);
  return line ? number(*line) : std::nullopt;
}

/// The value of one key of memory.stat.
std::optional<std::size_t> stat_value(const fs::path& file, std::string_view key) {
  std::ifstream in(file);
  std::string name;
  std::string value;
  while (in >> name >> value) {
    if (name == key) return number(value);
  }
  return std::nullopt;
}

template <class T>
void lower(std::optional<T>& limit, std::optional<T> other) {
  if (other) limit = limit ? std::min(*limit, *other) : *other;
}

struct Mount {
  std::string root;  ///< root of the hierarchy, as seen at the mount point
  fs::path point;
  bool version2 = false;
  std::string options;  ///< names the controllers of version 1
};

std::vector<Mount> read_mounts(const fs::path& root) {
  std::vector<Mount> mounts;
  std::ifstream in(root / "proc/self/mountinfo");
  for (std::string line; std::getline(in, line);) {
    std::istringstream fields(line);
    std::vector<std::string> words;
    for (std::string word; fields >> word;) words.push_back(word);
    const auto dash = std::find(words.begin(), words.end(), "-");
    if (words.size() < 6 || words.end() - dash < 2) continue;
    const std::string& type = *(dash + 1);
    if (type != "cgroup" && type != "cgroup2") continue;
    mounts.push_back({words[3], root / fs::path(words[4]).relative_path(), type == "cgroup2", words.back()});
  }
  return mounts;
}

bool lists(std::string_view list, std::string_view item) {
  while (!list.empty()) {
    const std::size_t comma = list.find(',');
    if (list.substr(0, comma) == item) return true;
    list = comma == std::string_view::npos ? std::string_view{} : list.substr(comma + 1);
  }
  return false;
}

/// The group's folder and its ancestors up to the mount point. Inside a container the group's path can
/// lie outside of what is mounted; then the mount point itself is the group.
std::vector<fs::path> folders_of(const Mount& mount, std::string_view group) {
  std::string_view below = group;
  if (mount.root != "/") {
    below = group.substr(0, mount.root.size()) == mount.root ? group.substr(mount.root.size()) : std::string_view{};
  }
  std::vector<fs::path> folders{mount.point};
  fs::path folder = mount.point;
  for (const fs::path& part : fs::path(below).relative_path()) {
    if (part == "..") return {mount.point};
    folder /= part;
    folders.push_back(folder);
  }
  return folders;
}

void lower_memory(CgroupLimits& limits, std::optional<std::size_t> limit, std::optional<std::size_t> used,
                  std::optional<std::size_t> reclaimable) {
  if (!limit) return;
  lower(limits.memory_limit, limit);
  // File pages that nobody uses count as used, but go as soon as memory is asked for.
  const std::size_t taken = used.value_or(0) - std::min(used.value_or(0), reclaimable.value_or(0));
  lower(limits.memory_room, std::optional(*limit - std::min(*limit, taken)));
}

void read_version2(CgroupLimits& limits, const fs::path& folder) {
  std::optional<std::size_t> limit = number_in(folder / "memory.max");
  lower(limit, number_in(folder / "memory.high"));  // beyond it the kernel slows the process down
  lower_memory(limits, limit, number_in(folder / "memory.current"),
               stat_value(folder / "memory.stat", "inactive_file"));
  std::ifstream in(folder / "cpu.max");
  std::string quota;
  std::string period;
  if (!(in >> quota >> period)) return;
  const auto q = number(quota);
  const auto p = number(period);
  if (q && p && *p > 0) lower(limits.cpus, std::optional(static_cast<double>(*q) / static_cast<double>(*p)));
}

void read_version1_memory(CgroupLimits& limits, const fs::path& folder) {
  lower_memory(limits, number_in(folder / "memory.limit_in_bytes"), number_in(folder / "memory.usage_in_bytes"),
               stat_value(folder / "memory.stat", "total_inactive_file"));
}

void read_version1_cpu(CgroupLimits& limits, const fs::path& folder) {
  const auto quota = number_in(folder / "cpu.cfs_quota_us");
  const auto period = number_in(folder / "cpu.cfs_period_us");
  if (quota && period && *period > 0) {
    lower(limits.cpus, std::optional(static_cast<double>(*quota) / static_cast<double>(*period)));
  }
}

}  // namespace

CgroupLimits read_cgroup_limits(const fs::path& root) {
  CgroupLimits limits;
  const std::vector<Mount> mounts = read_mounts(root);
  std::ifstream in(root / "proc/self/cgroup");
  for (std::string line; std::getline(in, line);) {
    // hierarchy:controllers:path
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string group = line.substr(second + 1);
    for (const Mount& mount : mounts) {
      for (const fs::path& folder : folders_of(mount, group)) {
        if (mount.version2 && controllers.empty()) read_version2(limits, folder);
        if (mount.version2 || controllers.empty()) continue;
        if (lists(controllers, "memory") && lists(mount.options, "memory")) read_version1_memory(limits, folder);
        if (lists(controllers, "cpu") && lists(mount.options, "cpu")) read_version1_cpu(limits, folder);
      }
    }
  }
  return limits;
}

}  // namespace tandem
