#pragma once
// Use of the machine by a step, from the engine's counters before and after it.
#include <cstdint>
#include <string>

#include "offload/engine/engine.hpp"
#include "scheduler/simulation/simulator.hpp"

namespace tandem {

struct ResourceUse {
  std::uint64_t h2d_bytes = 0;
  std::uint64_t d2h_bytes = 0;
  std::uint64_t file_read_bytes = 0;  ///< bytes of state read from a file
  std::uint64_t file_write_bytes = 0;
  double h2d_bytes_per_second = 0.0;  ///< while copies went that way; NaN where none did
  double d2h_bytes_per_second = 0.0;
  double dram_bytes_per_second = 0.0;  ///< bytes that the engine's copies and CPU tasks move, mean over the step
  /// Resource that was busy longest, by the names of the performance model: "compute", "host to device", "device to
  /// host", "CPU", "file"; or "DRAM" where it was the CPU and the memory ran at nine tenths of its rate or more.
  std::string bound_by;
};

/// `seconds`: between the two. `dram_rate`: bytes a second that the machine's memory moves; 0: unknown.
ResourceUse use_between(const EngineCounters& before, const EngineCounters& after, double seconds, double dram_rate);

/// How fast the work between the two went. `speculates`: whether its updates are predicted to run ahead of the norm.
/// The CPU's rate is left out (0) where they did otherwise, or were taken back: they took longer or less for that.
StepRates rates_between(const EngineCounters& before, const EngineCounters& after, bool speculates);

}  // namespace tandem
