#include "scheduler/search/trials.hpp"

#include <algorithm>
#include <set>
#include <utility>

#include "scheduler/simulation/coarsening.hpp"

namespace tandem {
namespace {

// Pieces that a step simulates one by one; where it has more, so many coarse pieces: their number is what a simulation
// costs, their size hardly matters.
constexpr std::int64_t few_pieces = 2000;
constexpr std::int64_t coarse_pieces_of_many = 300;
constexpr std::int64_t fewest_coarse_pieces = 120;

/// Coarse pieces of a simulation that is to be exact: 0, each piece for itself, unless a step of a large model and many
/// micro-batches would be tens of millions of tasks.
std::int64_t coarse_pieces_at_most(const Plan& plan) {
  constexpr std::int64_t most_pieces = 1'000'000;
  constexpr int passes = 4;  // passes that differ; later ones repeat them
  const Accumulation walked = coarsened({plan.max_micro_batches, plan.micro_batches_at_once}, fewest_micro_batches);
  const std::int64_t micro_batches = std::min(walked.micro_batches, passes * walked.at_once);
  std::int64_t pieces = 0;
  for (const Subgroup& s : plan.subgroups) pieces += (s.count() + plan.piece_elements - 1) / plan.piece_elements;
  return pieces * micro_batches <= most_pieces ? 0 : most_pieces / micro_batches;
}

}  // namespace

void sort_fastest_first(std::vector<Fitting>& fitting) {
  std::stable_sort(fitting.begin(), fitting.end(),
                   [](const Fitting& a, const Fitting& b) { return a.seconds() < b.seconds(); });
}

std::optional<Plan> Trials::plan(const OffloadOptions& options) {
  if (best_ && !few()) planned_ += std::ssize(best_->subgroups);
  return find_plan(in_.layout, options, in_.facts);
}

Simulation Trials::simulated(const Plan& plan, SimulationOptions options) {
  options.micro_batches = in_.options.max_micro_batches;
  options.memory = &memory_;
  const Simulation s = simulate(in_.layout, plan, in_.profile, in_.compute, options);
  ++simulations_;
  simulated_tasks_ += s.tasks;
  return s;
}

Simulation Trials::exactly(const Plan& plan, double limit) {
  return simulated(plan, {.coarse_pieces = coarse_pieces_at_most(plan), .give_up_after = limit});
}

/// 0 where there are few pieces.
std::int64_t Trials::quick_coarse_pieces(const Plan& plan) const {
  const std::int64_t pieces = in_.layout.state_elements() / plan.piece_elements * plan.max_micro_batches;
  if (pieces <= few_pieces) return 0;
  // Passes of several micro-batches are longer, and a coarse piece is a smaller part of one.
  const bool passes = plan.micro_batches_at_once < plan.max_micro_batches;
  return std::max(fewest_coarse_pieces,
                  passes ? coarse_pieces_of_many / plan.micro_batches_at_once : coarse_pieces_of_many);
}

Simulation Trials::quickly(const Plan& plan, double limit) {
  const std::int64_t coarse_pieces = quick_coarse_pieces(plan);
  if (coarse_pieces == 0) return exactly(plan, limit);
  return simulated(plan,
                   {.coarse_pieces = coarse_pieces, .give_up_after = std::min(limit, search_gains * in_.faster_than)});
}

StepRates Trials::measured_rates(const Plan& plan) {
  return simulated(plan, {.measured_rates = true, .coarse_pieces = quick_coarse_pieces(plan)}).rates;
}

void Trials::consider(const Policy& policy, std::optional<Plan> made) {
  Candidate candidate;
  candidate.policy = policy;
  if (made) {
    candidate.fits = true;
    candidate.shares = made->shares();
    candidate.device_bytes = made->memory.device_bytes();
    const bool many = made->subgroups.size() > few_subgroups;
    candidate.simulation = quickly(*made, many && best_ ? worth_knowing * best_seconds_ : unlimited);
    note(*made, candidate.simulation);
    const double seconds = candidate.simulation.step_seconds;
    if (!best_ || seconds < best_seconds_) {
      best_ = *made;
      best_seconds_ = seconds;
    }
    fitting_.push_back(*std::move(made));
  }
  candidates_.push_back(candidate);
}

double Trials::seconds_with(const Setting& setting, double limit) {
  OffloadOptions options = in_.options;
  options.policy = Policy::static_share(0.0);  // paths stand in its place, and weights are as resident as fits
  options.paths = setting.paths;
  options.update_threads = setting.update_threads > 0 ? std::optional(setting.update_threads) : std::nullopt;
  std::optional<Plan> made = plan(options);
  if (!made) return unlimited;
  made->policy = in_.options.policy;  // no fixed one
  const Simulation simulation = quickly(*made, std::max(limit, best_seconds_));
  note(*made, simulation);
  const double seconds = simulation.step_seconds;
  if (seconds < best_seconds_ * (1.0 - worthwhile)) {
    if (improved_) passed_.push_back(*std::move(best_));
    best_ = std::move(made);
    best_seconds_ = seconds;
    improved_ = true;
  }
  return seconds;
}

void Trials::note(const Plan& plan, const Simulation& simulation) {
  Start& best = best_of_kind_[plan.shares().streamed > 0 ? 1 : 0];
  const bool better = best.setting.paths.empty() || simulation.step_seconds < best.seconds;
  if (!simulation.given_up && better) best = {setting_of(plan), simulation.step_seconds};
}

std::vector<Fitting> Trials::fitting() {
  std::vector<Fitting> fitting;
  for (Candidate& candidate : candidates_) {
    if (candidate.fits) fitting.push_back({&candidate, &fitting_[fitting.size()]});
  }
  return fitting;
}

std::vector<Fitting> Trials::fastest_policies(std::size_t most) {
  std::vector<Fitting> fixed = fitting();
  sort_fastest_first(fixed);
  std::vector<Fitting> fastest;
  std::set<Setting> known;
  for (const Fitting& f : fixed) {
    if (fastest.size() == most) break;
    if (known.insert(setting_of(*f.plan)).second) fastest.push_back(f);
  }
  return fastest;
}

}  // namespace tandem
