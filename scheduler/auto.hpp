#pragma once
// Chooses a plan: every fixed policy is simulated, the best is improved, and all are kept for the explanation.
#include <string>
#include <vector>

#include "scheduler/simulator.hpp"

namespace tandem {

/// One policy that was looked at.
struct Candidate {
  Policy policy;
  bool fits = false;
  bool improved = false;  ///< a division of its own, found from this policy's
  Plan::Shares shares;
  std::size_t device_bytes = 0;
  Simulation simulation;  ///< where it fits
};

struct Choice {
  Plan plan;
  Simulation simulation;
  std::vector<Candidate> candidates;   ///< by step time, those that do not fit last
  double closed_form_cpu_share = 0.0;  ///< of what is not resident, by the closed form
};

/// The predicted best of all policies that fit and of what a search makes of the best: residents first (they
/// save their whole update), then the division of the rest between CPU and streaming. Never predicted slower than
/// a fixed policy. `options.policy` must be automatic, else that one alone is a candidate. `present`: a plan that fits and
/// is a candidate too; null: none. Throws as make_plan, where nothing fits.
Choice choose_plan(const ParameterLayout& layout, const OffloadOptions& options, const PlanningFacts& facts,
                   const MachineProfile& profile, std::span<const LayerSeconds> compute,
                   const Plan* present = nullptr);

/// What a wider machine would bring: the chosen policy's step with one resource doubled, chosen anew.
struct Upgrade {
  std::string what;
  double step_seconds = 0.0;
};
/// By gain, largest first. `chosen`, the plan of the machine as it is, is a candidate on each wider one.
std::vector<Upgrade> upgrades(const ParameterLayout& layout, const OffloadOptions& options, const PlanningFacts& facts,
                              const MachineProfile& profile, std::span<const LayerSeconds> compute, const Plan& chosen);

}  // namespace tandem
