#pragma once
// Chooses a plan: every fixed policy is simulated, the best is improved, and all are kept for the explanation.
#include <limits>
#include <string>
#include <vector>

#include "scheduler/simulation/simulator.hpp"

namespace tandem {

/// One policy that was looked at.
struct Candidate {
  Policy policy;
  bool fits = false;
  bool improved = false;  ///< a division of its own, which no fixed policy names: `policy` is automatic
  Plan::Shares shares;
  std::size_t device_bytes = 0;
  Simulation simulation;  ///< empty where the plan does not fit; given up where it is sure to be no faster than what
                          ///< was chosen
};

struct Choice {
  Plan plan;
  Simulation simulation;
  std::vector<Candidate> candidates;   ///< by step time, then those given up; those that do not fit last
  double closed_form_cpu_share = 0.0;  ///< by the closed form, the CPU's share of the state that is not resident
  int simulations = 0;                 ///< simulations that the search took
  std::int64_t simulated_tasks = 0;    ///< simulated tasks, the cost of the search
};

/// Settings of a search beside the options.
struct SearchSettings {
  const Plan* present = nullptr;  ///< a plan that fits and is a candidate too; null: none
  /// Seconds of a step that the caller can have otherwise. Where the best that was found is sure to be slower the
  /// search ends there, and `Choice::simulation` is given up.
  double faster_than = std::numeric_limits<double>::infinity();
  /// Whatever may be the fastest fixed policy is compared piece by piece; else `present` alone is.
  bool never_slower_than_fixed = true;
};

/// Whether choose_plan finds a plan.
bool some_policy_fits(const ParameterLayout& layout, OffloadOptions options, const PlanningFacts& facts);

/// The predicted best of all policies that fit and of what a search makes of the best: residents first (they
/// save their whole update), then the division of the rest between CPU and streaming. Never predicted slower than
/// a fixed policy, of many subgroups by no more than a thousandth. `options.policy` must be automatic, else that one
/// alone is a candidate. With fp8_factors both ways in which these may cross the link are searched. `compute` has one
/// entry for each layer. Blocks, from tenths of a second to several: longest with many micro-batches. Throws as
/// make_plan, where nothing fits, as `simulate`, and MisuseError for a `compute` of other layers.
Choice choose_plan(const ParameterLayout& layout, const OffloadOptions& options, const PlanningFacts& facts,
                   const MachineProfile& profile, std::span<const LayerSeconds> compute,
                   const SearchSettings& settings = {});

}  // namespace tandem
