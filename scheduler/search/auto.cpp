#include "scheduler/search/auto.hpp"

#include <algorithm>
#include <optional>
#include <utility>

#include "scheduler/plan/link_codes.hpp"
#include "scheduler/search/division_search.hpp"
#include "scheduler/search/trials.hpp"

namespace tandem {
namespace {

// Simulated tasks that may be spent at the end on what was the best for a while, where there are many subgroups; and on
// comparing with fixed policies piece by piece: what is reached by hundreds of thousands of pieces alone.
constexpr std::int64_t task_budget_at_the_end = 150'000;
constexpr std::int64_t task_budget_of_comparison = 8'000'000;

std::vector<Policy> fixed_policies() {
  std::vector<Policy> policies{Policy::device(), Policy::host(), Policy::stream()};
  for (int tenths = 0; tenths < 10; ++tenths) policies.push_back(Policy::static_share(tenths / 10.0));
  for (const int stride : {2, 3, 4, 5, 8}) {
    for (int tenths = 0; tenths < 10; ++tenths) policies.push_back(Policy::interleave(stride, tenths / 10.0));
  }
  return policies;
}

/// `device` keeps every layer there.
bool contradicts(const ParameterLayout& layout, const OffloadOptions& options) {
  return options.policy.kind == Policy::Kind::device && keeps_fewer_layers(layout, options);
}

/// Fixed policies, what a search makes of the best of them, and a comparison of the two piece by piece.
class Search {
 public:
  Search(const SearchInput& input, const SearchSettings& settings)
      : in_(input), settings_(settings), trials_(in_), divisions_(in_, trials_) {}

  Choice run();

 private:
  void try_fixed();
  void settle();
  void compare_fixed();
  void compare_passed();
  double noticeably_less() const;
  bool take_if_faster(const Plan& plan, const Simulation& simulation);
  Choice choice();
  bool automatic() const { return in_.options.policy.kind == Policy::Kind::automatic; }

  SearchInput in_;
  const SearchSettings& settings_;
  Trials trials_;
  DivisionSearch divisions_;
  // State of `settle`:
  Plan chosen_;
  Simulation simulation_;
  bool improved_ = false;
};

void Search::try_fixed() {
  std::vector<Policy> policies{in_.options.policy};
  if (automatic()) policies = fixed_policies();
  // First, so that another takes its place only where it is faster.
  if (settings_.present != nullptr) trials_.consider(settings_.present->policy, *settings_.present);
  for (const Policy& policy : policies) {
    OffloadOptions fixed = in_.options;
    fixed.policy = policy;
    trials_.consider(fixed.policy, contradicts(in_.layout, fixed) ? std::nullopt : trials_.plan(fixed));
  }
}

/// Simulates the best piece by piece, and whatever coarse pieces may have made slower than it.
void Search::settle() {
  chosen_ = trials_.best();
  improved_ = trials_.improved();
  simulation_ = trials_.exactly(chosen_, settings_.faster_than);
  if (simulation_.given_up) return;
  compare_fixed();
  compare_passed();
  if (chosen_.micro_batches_at_once > 1) simulation_.rates = trials_.measured_rates(chosen_);
}

/// The closest first, until coarse pieces are sure to have been slower, or too much has been spent.
void Search::compare_fixed() {
  std::vector<Fitting> compared = trials_.fitting();
  if (!settings_.never_slower_than_fixed) compared.resize(settings_.present != nullptr ? 1 : 0);
  sort_fastest_first(compared);
  const std::int64_t allowance = trials_.spent() + task_budget_of_comparison;
  for (const auto& [candidate, plan] : compared) {
    if (trials_.spent() > allowance) break;
    const bool many = plan->subgroups.size() > few_subgroups;
    if (many && candidate->simulation.step_seconds > off_when_coarsened * simulation_.step_seconds) break;
    if (!improved_ && plan->policy == chosen_.policy) {
      candidate->simulation = simulation_;  // a comparison with itself would give up at its own time
      continue;
    }
    candidate->simulation = trials_.exactly(*plan, many ? noticeably_less() : unlimited);
    if (take_if_faster(*plan, candidate->simulation)) improved_ = false;
  }
}

/// Than the step chosen so far. Many plans take as long as the device computes, and which of them takes a millionth
/// less is known only at the end of a step.
double Search::noticeably_less() const { return (1.0 - as_good_as_any) * simulation_.step_seconds; }

/// The search may have followed what only coarse pieces gain by.
void Search::compare_passed() {
  if (trials_.few()) return;
  std::vector<Plan>& passed = trials_.passed();
  const std::int64_t allowance = trials_.spent() + task_budget_at_the_end;
  for (; !passed.empty() && trials_.spent() < allowance; passed.pop_back()) {
    const Simulation exact = trials_.exactly(passed.back(), noticeably_less());
    if (take_if_faster(passed.back(), exact)) improved_ = true;
  }
}

bool Search::take_if_faster(const Plan& plan, const Simulation& simulation) {
  if (simulation.given_up || simulation.step_seconds >= simulation_.step_seconds) return false;
  simulation_ = simulation;
  chosen_ = plan;
  return true;
}

Choice Search::choice() {
  std::vector<Candidate> candidates = std::move(trials_.candidates());
  if (improved_) {
    candidates.push_back({chosen_.policy, true, true, chosen_.shares(), chosen_.memory.device_bytes(), simulation_});
  }
  std::stable_sort(candidates.begin(), candidates.end(), [](const Candidate& a, const Candidate& b) {
    if (a.fits != b.fits) return a.fits;
    if (a.simulation.given_up != b.simulation.given_up) return b.simulation.given_up;
    return a.simulation.step_seconds < b.simulation.step_seconds;
  });
  chosen_.chosen_by_auto = automatic();
  return {.plan = std::move(chosen_),
          .simulation = simulation_,
          .candidates = std::move(candidates),
          .closed_form_cpu_share = divisions_.closed_form_cpu_share(),
          .simulations = trials_.simulations(),
          .simulated_tasks = trials_.simulated_tasks()};
}

Choice Search::run() {
  try_fixed();
  // The refusal of make_plan names what would fit.
  if (trials_.none_fits()) trials_.consider(in_.options.policy, make_plan(in_.layout, in_.options, in_.facts));
  if (automatic() && trials_.best_seconds() <= search_gains * settings_.faster_than) divisions_.run();
  settle();
  return choice();
}

bool has_factors(const ParameterLayout& layout) {
  return std::ranges::any_of(layout.layers(), [](const Layer& layer) { return code_bytes(layer) > 0; });
}

bool is_faster(const Simulation& a, const Simulation& b) {
  return !a.given_up && (b.given_up || a.step_seconds < b.step_seconds);
}

}  // namespace

bool some_policy_fits(const ParameterLayout& layout, OffloadOptions options, const PlanningFacts& facts) {
  if (options.policy.kind != Policy::Kind::automatic) return find_plan(layout, options, facts).has_value();
  return std::ranges::any_of(fixed_policies(), [&](const Policy& policy) {
    options.policy = policy;
    return !contradicts(layout, options) && find_plan(layout, options, facts);
  });
}

Choice choose_plan(const ParameterLayout& layout, const OffloadOptions& options, const PlanningFacts& facts,
                   const MachineProfile& profile, std::span<const LayerSeconds> compute,
                   const SearchSettings& settings) {
  const auto search = [&](const OffloadOptions& of) {
    return Search({layout, of, facts, profile, compute, settings.faster_than}, settings).run();
  };
  Choice choice = search(options);
  if (!options.link_codes || !has_factors(layout)) return choice;
  // Codes spare the link bytes, and cost the CPU a pass over all weights.
  OffloadOptions as_stored = options;
  as_stored.link_codes = false;
  Choice other = search(as_stored);
  Choice& faster = is_faster(other.simulation, choice.simulation) ? other : choice;
  faster.simulations = choice.simulations + other.simulations;
  faster.simulated_tasks = choice.simulated_tasks + other.simulated_tasks;
  return std::move(faster);
}

}  // namespace tandem
