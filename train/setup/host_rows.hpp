#pragma once
// Rows of the memory plan that follow from the program and its formats, beside those of engine and model.
#include <cstddef>

#include "core/memory/memory.hpp"
#include "train/setup/run_plan.hpp"

namespace tandem {

/// Host bytes of one rank.
struct HostRows {
  std::size_t program = 0;  ///< bytes that the process held before: code's own data, libraries, threads
  std::size_t libraries = 0;
  std::size_t subgroups = 0;  ///< the engine's lists of them and of their tasks
  std::size_t batches = 0;
  std::size_t staging = 0;    ///< pinned, between device and network, where there are several processes
  std::size_t reference = 0;  ///< log-probabilities under the reference of DPO
  std::size_t digest = 0;
  std::size_t conversion = 0;  ///< buffers for state that is not stored as fp32, while it is read or written
  std::size_t file = 0;        ///< blocks of state in a file, while it is read or written
  std::size_t checkpoint = 0;
  std::size_t writer = 0;

  std::size_t total() const noexcept {
    return program + libraries + subgroups + batches + staging + reference + digest + conversion + file + checkpoint +
           writer;
  }
  void add_to(MemoryPlan& memory) const;
};

/// `run` has its layout, options and number of batches.
HostRows host_rows(const RunPlan& run, const RunPurpose& purpose, const RunMachine& machine);

}  // namespace tandem
