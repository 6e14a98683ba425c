#pragma once
// When DPO's reference is computed: before the first step, or in each step.
#include <cstdint>
#include <functional>

#include "train/config/config.hpp"
#include "train/hf/model_source.hpp"
#include "train/setup/run_plan.hpp"

namespace tandem {

/// Whether steps can compute the reference: where adapters are trained and nothing else, so that the model at step 0 is
/// the base, alone or with a copy of the adapters that training goes on from. `source`: with the run's adapters.
bool steps_compute_reference(const TrainConfig& config, const ModelSource& source);

/// Says whether the reference has adapters, and leaves open when the reference is computed only where steps can do so.
/// Throws UsageError where the configuration asks for these and they cannot.
void settle_reference(TrainConfig& config, const ModelSource& source);

/// Whether the plan is to choose, by a configuration that was settled.
bool chooses_reference(const TrainConfig& config, const ModelConfig& model) noexcept;

/// Amount of work that either way has on one rank.
struct ReferenceWork {
  std::int64_t passes = 0;  ///< micro-batches of records before the first step
  std::int64_t steps = 0;   ///< steps of the run; where that is not known, those of one epoch, or one
  bool repeats = false;     ///< records are used more than once
};
/// `config`: of one rank of so many.
ReferenceWork reference_work(const TrainConfig& config, int ranks) noexcept;

/// The plan of the way that is predicted to take less time in all. Without a prediction it is the steps, unless records
/// are used more than once and no layer is streamed. `plan`: makes the plan of a configuration. Throws what that does.
RunPlan cheaper_reference(const TrainConfig& config, int ranks, const std::function<RunPlan(const TrainConfig&)>& plan);

}  // namespace tandem
