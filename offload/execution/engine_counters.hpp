#pragma once
// Counters of an engine: bytes, parameters and seconds, counted where the work is executed.
#include <cstdint>

namespace tandem {

/// Seconds that each kind of work ran, without its own waits for others; work side by side counts in each kind.
struct LaneSeconds {
  double compute = 0.0;         ///< the caller's work between fetch and release, gradients and commit
  double host_to_device = 0.0;  ///< copies
  double device_to_host = 0.0;
  double device_update = 0.0;  ///< the engine's own kernels
  double peers = 0.0;          ///< exchanges between ranks of a group
  double cpu = 0.0;            ///< the engine's tasks on the CPU
  double file_read = 0.0;      ///< state that lives in a file
  double file_write = 0.0;
  double cpu_update = 0.0;  ///< part of `cpu` in updates
};

/// Totals since the engine was made, counted where the work is executed.
struct EngineCounters {
  std::uint64_t bytes_host_to_device = 0;
  std::uint64_t bytes_device_to_host = 0;
  std::uint64_t bytes_from_peers = 0;        ///< weights and gradients of other ranks
  std::uint64_t parameters_updated_cpu = 0;  ///< elements, padding not counted
  std::uint64_t parameters_updated_streamed = 0;
  std::uint64_t parameters_updated_resident = 0;
  std::uint64_t parameters_speculated = 0;  ///< updated before the gradient norm was known, padding counted
  std::uint64_t parameters_taken_back = 0;  ///< speculated updates that the norm did not confirm
  std::uint64_t confirmed_steps = 0;    ///< steps whose updates ran ahead of the norm, and stayed
  std::uint64_t rolled_back_steps = 0;  ///< steps whose updates ran ahead of the norm, and were taken back
  std::uint64_t skipped_steps = 0;
  std::uint64_t dram_bytes = 0;       ///< bytes of host memory read or written by copies and the engine's CPU tasks
  std::uint64_t bytes_from_file = 0;  ///< bytes of state that lives there, padding of its pieces included
  std::uint64_t bytes_to_file = 0;
  LaneSeconds busy;
  double update_seconds = 0.0;     ///< from the decision to update until the last update of the step was done
  double save_wait_seconds = 0.0;  ///< some update waited for a save to read its state, and for nothing else
};

}  // namespace tandem
