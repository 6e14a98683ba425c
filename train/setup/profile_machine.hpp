#pragma once
// The machine of a profile, as a run is planned for it.
#include <memory>

#include "core/ops/ops.hpp"
#include "models/config/config.hpp"
#include "scheduler/machine/profile.hpp"
#include "train/config/config.hpp"
#include "train/setup/run_plan.hpp"

namespace tandem {

/// Owner of what a RunMachine refers to.
struct ProfileMachine {
  std::unique_ptr<OpsRules> rules;
  RunMachine machine;
};

/// The machine of `profile` for a run of this configuration: its memory, less what its system is assumed to keep,
/// unless the configuration has ceilings; its rates, with link and update as the configuration emulates them, shared by
/// all ranks. Throws PlanError where a ceiling is above the device's memory, UsageError where state may go to a file
/// whose rates the profile lacks.
ProfileMachine machine_of(const MachineProfile& profile, const TrainConfig& config);

}  // namespace tandem
