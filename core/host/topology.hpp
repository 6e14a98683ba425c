#pragma once
// Facts about this machine. Zero or empty means unknown, never a guess.
#include <cstddef>
#include <filesystem>
#include <string>

namespace tandem {

struct Topology {
  std::string cpu_model;
  int cores = 0;         ///< physical cores this process may run on
  int logical_cpus = 0;  ///< hardware threads this process may run on (affinity and cgroup quota respected)
  int numa_nodes = 0;
  std::size_t cache_bytes = 0;             ///< bytes of all last-level caches together
  std::size_t memory_bytes = 0;            ///< installed, or the cgroup's limit where that is lower
  std::size_t available_memory_bytes = 0;  ///< bytes that may still be taken: the lower of MemAvailable and cgroup room
  std::size_t memory_room_bytes = 0;       ///< the most that may come free: the lower of installed and cgroup room
};

/// Reads hwloc, and /proc and the cgroup files below `root` ("/" but in tests). Does not throw: what cannot be read
/// stays unknown.
Topology read_topology(const std::filesystem::path& root = "/");

/// Anonymous and pinned memory of this process: now, and its high-water mark, in bytes. 0 if unknown.
struct ProcessMemory {
  std::size_t anonymous = 0;
  std::size_t peak_anonymous = 0;  ///< largest value seen by `sample_process_memory` so far
};
ProcessMemory sample_process_memory();

}  // namespace tandem
