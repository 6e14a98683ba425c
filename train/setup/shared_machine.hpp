#pragma once
// The machine that several processes plan for: one for all, so that all make one plan.
#include <string>
#include <vector>

#include "core/device/device.hpp"
#include "train/setup/processes.hpp"
#include "train/setup/run_plan.hpp"

namespace tandem {

struct SharedMachine {
  RunMachine machine;
  std::vector<std::string> device_names;  ///< by rank
};

/// `own`: this process' machine, with the rates of it alone. Rates are rank 0's. Of memory each machine has room for as
/// much of the run as the one that has least for each of its ranks. A call of all processes. Throws UsageError where
/// devices are of different kinds, on which the same work has other bits.
SharedMachine machine_of_all(Processes& processes, RunMachine own, const DeviceInfo& device);

}  // namespace tandem
