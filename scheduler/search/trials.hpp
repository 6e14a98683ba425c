#pragma once
// Plans that a search has made and simulated, what that cost, and which was the best.
#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <vector>

#include "scheduler/search/auto.hpp"
#include "scheduler/search/division.hpp"

namespace tandem {

// Beyond this many subgroups, single ones do not matter.
constexpr std::size_t few_subgroups = 48;
constexpr double unlimited = std::numeric_limits<double>::infinity();
// A plan whose coarsened step takes up to so many times the best may be the best piece by piece: coarsened steps were
// at most 4.1% off. Of a longer one it is enough to know that it is longer.
constexpr double off_when_coarsened = 1.12;
constexpr double worth_knowing = off_when_coarsened * off_when_coarsened;
// Where the best fixed policy takes longer by more than this, a search does not catch up: it was seen to gain a fifth.
constexpr double search_gains = 1.3;
constexpr double worthwhile = 1e-6;  // relative gain below which a change is noise
// A step that is longer by no more than this share is as good as any.
constexpr double as_good_as_any = 1e-3;

/// Inputs of planning and simulation. All of them outlive the search.
struct SearchInput {
  const ParameterLayout& layout;
  const OffloadOptions& options;
  const PlanningFacts& facts;
  const MachineProfile& profile;
  std::span<const LayerSeconds> compute;
  double faster_than = unlimited;  ///< SearchSettings'
};

/// Setting from which a search goes on, piece by piece.
struct Start {
  Setting setting;
  double seconds = 0.0;
};

/// A candidate and its plan. Until the search ends both stay where they are.
struct Fitting {
  Candidate* candidate = nullptr;
  const Plan* plan = nullptr;
  double seconds() const { return candidate->simulation.step_seconds; }
};
void sort_fastest_first(std::vector<Fitting>& fitting);

class Trials {
 public:
  explicit Trials(const SearchInput& input) : in_(input) {}

  /// None where it does not fit.
  std::optional<Plan> plan(const OffloadOptions& options);
  /// Piece by piece. Gives up beyond `limit` seconds, where what is returned lies beyond it too; so does `quickly`.
  Simulation exactly(const Plan& plan, double limit);
  /// Coarsened, where there are many pieces.
  Simulation quickly(const Plan& plan, double limit);
  /// The rates that a run would measure.
  StepRates measured_rates(const Plan& plan);

  /// A fixed policy and its plan, where it fits.
  void consider(const Policy& policy, std::optional<Plan> made);
  /// Infinite where it does not fit, and no less than `limit` where it is not. Keeps the plan where it is the best so
  /// far.
  double seconds_with(const Setting& setting, double limit);

  /// The fixed policies that fit, in the order in which they were considered.
  std::vector<Fitting> fitting();
  /// The fastest fixed policies that fit, at most `most`, with divisions that differ.
  std::vector<Fitting> fastest_policies(std::size_t most);
  /// The best of what streams no state and of what does. No paths: there was none.
  const std::array<Start, 2>& best_of_kind() const noexcept { return best_of_kind_; }

  bool none_fits() const noexcept { return fitting_.empty(); }
  /// The best plan so far. At least one must fit.
  const Plan& best() const { return *best_; }
  double best_seconds() const noexcept { return best_seconds_; }  ///< seconds of the best plan, by `quickly`
  bool few() const { return best_->subgroups.size() <= few_subgroups; }
  bool improved() const noexcept { return improved_; }  ///< whether the best is no fixed policy
  /// Plans that were the best for a while, and no fixed policy's.
  std::vector<Plan>& passed() noexcept { return passed_; }
  std::vector<Candidate>& candidates() noexcept { return candidates_; }

  int simulations() const noexcept { return simulations_; }
  std::int64_t simulated_tasks() const noexcept { return simulated_tasks_; }
  /// Simulated tasks, and the subgroups of large plans: to plan one costs what a task does.
  std::int64_t spent() const noexcept { return simulated_tasks_ + planned_; }

 private:
  Simulation simulated(const Plan& plan, SimulationOptions options);
  std::int64_t quick_coarse_pieces(const Plan& plan) const;
  void note(const Plan& plan, const Simulation& simulation);

  SearchInput in_;
  SimulationMemory memory_;
  std::vector<Candidate> candidates_;
  std::vector<Plan> fitting_;  ///< plans of the `candidates_` that fit, in their order
  std::optional<Plan> best_;
  double best_seconds_ = 0.0;
  std::array<Start, 2> best_of_kind_;
  std::vector<Plan> passed_;
  bool improved_ = false;
  int simulations_ = 0;
  std::int64_t simulated_tasks_ = 0;
  std::int64_t planned_ = 0;
};

}  // namespace tandem
