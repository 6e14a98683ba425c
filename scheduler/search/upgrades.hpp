#pragma once
// Upgrades of a machine that would help most.
#include <span>
#include <string>
#include <vector>

#include "scheduler/machine/cost_model.hpp"
#include "scheduler/machine/profile.hpp"
#include "scheduler/plan/options.hpp"
#include "scheduler/plan/plan.hpp"

namespace tandem {

/// Predicted effect of a wider machine: the step of the plan chosen anew with one resource doubled.
struct Upgrade {
  std::string what;
  double step_seconds = 0.0;
};
/// Upgrades by gain, largest first. `chosen`, the plan of the machine as it is, is a candidate on each wider one.
std::vector<Upgrade> upgrades(const ParameterLayout& layout, const OffloadOptions& options, const PlanningFacts& facts,
                              const MachineProfile& profile, std::span<const LayerSeconds> compute, const Plan& chosen);

}  // namespace tandem
