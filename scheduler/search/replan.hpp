#pragma once
// Whether a run goes as predicted, and another plan where it does not.
#include <optional>
#include <vector>

#include "scheduler/search/auto.hpp"

namespace tandem {

/// Books beside a plan, under the same ceilings, what it takes to update all that is not resident on the CPU, or to
/// stream all of it: so that the engine can adopt another division. Nothing where even that does not fit.
void book_room_for_change(Plan& plan, const ParameterLayout& layout, const OffloadOptions& options,
                          const PlanningFacts& facts);

struct ReplanSettings {
  int window = 10;          ///< steps whose median is looked at; those before the first `window` warm up
  double band = 1.25;       ///< a rate off by no more than this factor is as predicted
  double worthwhile = 0.1;  ///< predicted gain, as a share of the step, below which the plan stays
};

/// Compares each step's rates with the plan's prediction. Where they leave the band, the model's figures are scaled to
/// what was measured, and a plan is chosen anew within the memory that is booked. From then on the corrected prediction
/// is what the run is held against, so that it is not asked again for the same reason.
class Replanner {
 public:
  struct Change {
    Plan plan;
    double seconds_before = 0.0;  ///< a step, as the corrected model has it
    double seconds_after = 0.0;
  };

  /// `layout` must outlive it. `options` are those that `plan` was chosen with; `predicted` is its simulation.
  Replanner(const ParameterLayout& layout, const OffloadOptions& options, const PlanningFacts& facts,
            MachineProfile profile, std::vector<LayerSeconds> compute, Plan plan, const Simulation& predicted,
            ReplanSettings settings = {});

  /// The plan to go on with, where it is another one. Mostly a few comparisons; now and then a second of search.
  std::optional<Change> after_step(const StepRates& measured);
  const MachineProfile& profile() const noexcept { return profile_; }

 private:
  bool as_predicted(const StepRates& measured) const;
  void correct(const StepRates& measured);
  std::optional<Change> choose_anew();

  const ParameterLayout& layout_;
  OffloadOptions options_;
  PlanningFacts facts_;
  MachineProfile profile_;
  std::vector<LayerSeconds> compute_;
  Plan plan_;
  StepRates predicted_;
  ReplanSettings settings_;
  int warming_up_;
  std::vector<StepRates> steps_;
};

}  // namespace tandem
