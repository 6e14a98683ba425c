#include "core/host/topology.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <fstream>
#include <memory>
#include <string_view>

#include "core/host/cgroup.hpp"
#include "core/host/hwloc_owners.hpp"

namespace tandem {
namespace {

/// Bytes of a line "Key:   123 kB" of a file under /proc; 0 where absent.
std::size_t proc_kilobytes(const std::filesystem::path& file, std::string_view key) {
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);) {
    if (line.compare(0, key.size(), key) != 0) continue;
    return static_cast<std::size_t>(std::strtoull(line.c_str() + key.size(), nullptr, 10)) * 1024;
  }
  return 0;
}

std::string cpu_model_of_proc() {
  std::ifstream in("/proc/cpuinfo");
  for (std::string line; std::getline(in, line);) {
    if (line.compare(0, 10, "model name") != 0) continue;
    const std::size_t colon = line.find(':');
    const std::size_t begin = colon == std::string::npos ? colon : line.find_first_not_of(" \t", colon + 1);
    return begin == std::string::npos ? std::string{} : line.substr(begin);
  }
  return {};
}

std::size_t last_level_cache(hwloc_topology_t topology) {
  for (const hwloc_obj_type_t level : {HWLOC_OBJ_L4CACHE, HWLOC_OBJ_L3CACHE, HWLOC_OBJ_L2CACHE}) {
    std::size_t bytes = 0;
    for (hwloc_obj_t o = nullptr; (o = hwloc_get_next_obj_by_type(topology, level, o)) != nullptr;) {
      bytes += o->attr->cache.size;
    }
    if (bytes > 0) return bytes;
  }
  return 0;
}

void read_processors(Topology& result) {
  hwloc_topology_t raw = nullptr;
  if (hwloc_topology_init(&raw) != 0) return;
  const OwnedTopology topology(raw);
  if (hwloc_topology_load(raw) != 0) return;

  // The allowed set leaves out what a cpuset forbids; binding leaves out what taskset does.
  const OwnedBitmap usable(hwloc_bitmap_dup(hwloc_topology_get_allowed_cpuset(raw)));
  const OwnedBitmap bound(hwloc_bitmap_alloc());
  if (!usable || !bound) return;
  if (hwloc_get_cpubind(raw, bound.get(), HWLOC_CPUBIND_PROCESS) == 0) {
    hwloc_bitmap_and(usable.get(), usable.get(), bound.get());
  }
  result.logical_cpus = std::max(0, hwloc_bitmap_weight(usable.get()));
  for (hwloc_obj_t core = nullptr; (core = hwloc_get_next_obj_by_type(raw, HWLOC_OBJ_CORE, core)) != nullptr;) {
    if (hwloc_bitmap_intersects(core->cpuset, usable.get()) != 0) ++result.cores;
  }
  result.cache_bytes = last_level_cache(raw);
  result.numa_nodes = std::max(0, hwloc_get_nbobjs_by_type(raw, HWLOC_OBJ_NUMANODE));
  if (const hwloc_obj_t package = hwloc_get_obj_by_type(raw, HWLOC_OBJ_PACKAGE, 0)) {
    if (const char* model = hwloc_obj_get_info_by_name(package, "CPUModel")) result.cpu_model = model;
  }
}

void apply(const CgroupLimits& limits, Topology& result) {
  if (limits.cpus && result.logical_cpus > 0) {
    const int quota = static_cast<int>(std::min(std::ceil(*limits.cpus), 1e6));
    result.logical_cpus = std::min(result.logical_cpus, std::max(1, quota));
  }
  result.memory_room_bytes = result.memory_bytes;
  if (limits.memory_limit) {
    result.memory_bytes =
        result.memory_bytes == 0 ? *limits.memory_limit : std::min(result.memory_bytes, *limits.memory_limit);
  }
  if (!limits.memory_room) return;
  // Zero would read as unknown, and no room at all is known: one byte.
  const std::size_t room = std::max<std::size_t>(1, *limits.memory_room);
  for (std::size_t* bytes : {&result.available_memory_bytes, &result.memory_room_bytes}) {
    if (*bytes > 0) *bytes = std::min(*bytes, room);
  }
}

}  // namespace

Topology read_topology(const std::filesystem::path& root) {
  Topology result;
  try {
    read_processors(result);
    if (result.cpu_model.empty()) result.cpu_model = cpu_model_of_proc();
    result.memory_bytes = proc_kilobytes(root / "proc/meminfo", "MemTotal:");
    result.available_memory_bytes = proc_kilobytes(root / "proc/meminfo", "MemAvailable:");
    apply(read_cgroup_limits(root), result);
  } catch (...) {
    // Keep the fields read so far; the rest stays unknown, as documented.
  }
  return result;
}

ProcessMemory sample_process_memory() {
  static std::atomic<std::size_t> peak{0};
  const std::size_t now = proc_kilobytes("/proc/self/status", "RssAnon:");
  std::size_t seen = peak.load();
  while (seen < now && !peak.compare_exchange_weak(seen, now)) {
  }
  return {now, std::max(seen, now)};
}

}  // namespace tandem
