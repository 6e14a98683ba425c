#pragma once
// One step of training: its batches, forward and backward on every device, and the update.
#include <cstdint>
#include <functional>

#include "core/params/parameter_access.hpp"
#include "offload/engine/engine.hpp"
#include "train/loop/prepared_run.hpp"
#include "train/loop/reference.hpp"
#include "train/runtime/phase_clock.hpp"
#include "train/runtime/rank_workers.hpp"

namespace tandem {

struct StepResult {
  StepReport report;
  double loss = 0.0;                   ///< mean over the targets, or pairs; NaN where there are none
  std::int64_t targets = 0;            ///< 0: nothing has been trained, and the step is skipped
  std::optional<PairMetrics> pairs{};  ///< figures of preferences
};

class StepRunner {
 public:
  /// Takes the run's data in the order of its sampler. All must outlive it. `reference` is there before the first step.
  StepRunner(PreparedRun& run, RankWorkers& workers, const Reference& reference);

  /// Blocks until the losses are there; updates may still run. Throws TrainingError, with the sampler where it was.
  StepResult step(double lr);
  /// Waits for both, of the last step.
  void finish_forward_and_backward(double& forward, double& backward) {
    clock_.finish_forward_and_backward(forward, backward);
  }

 private:
  std::int64_t fill_batches();
  void fill_row(const HostBatch& batch, std::int64_t row, std::size_t source, std::int64_t window,
                std::int64_t& targets) const;
  StepReport run_micro_batches(double lr, std::int64_t terms);
  void run_passes(LoadedModel& member, Rank rank, ParameterAccess& parameters, std::int64_t terms,
                  const std::function<void()>& begin_forward);

  PreparedRun& run_;
  RankWorkers& workers_;
  const Reference& reference_;
  PhaseClock clock_;
};

}  // namespace tandem
