#pragma once
// The machine that `tandem bench` measures on, and its words to people.
#include <string>

#include "core/device/device.hpp"
#include "core/params/parameter_layout.hpp"
#include "scheduler/machine/profile.hpp"
#include "train/config/config.hpp"

namespace tandem {

/// One line on standard error.
void say(const std::string& line);

/// The calibration of this machine, or a quick one where there is none, or none that knows the file that the state is
/// to be in. Blocks. Throws BenchInterrupted.
MachineProfile calibrated(Device& device, const TrainConfig& config, const ParameterLayout& layout);

}  // namespace tandem
