#include "train/loop/step_runner.hpp"

#include <algorithm>
#include <limits>
#include <numeric>

#include "core/base/error.hpp"
#include "train/setup/training_data.hpp"

namespace tandem {

StepRunner::StepRunner(PreparedRun& run, RankWorkers& workers, const Reference& reference)
    : run_(run),
      workers_(workers),
      reference_(reference),
      clock_(*run.setup.device, run.setup.options.watchdog_seconds) {}

StepResult StepRunner::step(double lr) {
  const MixSampler::State data_before = run_.sampler->state();
  StepResult result;
  result.targets = fill_batches();
  if (result.targets == 0) {
    // Nothing to learn from: an update by momentum and decay alone would leave a trace.
    result.report.skipped = true;
    result.loss = result.report.gradient_norm = std::numeric_limits<double>::quiet_NaN();
    return result;
  }
  const bool preferences = run_.config().objective == Objective::dpo;
  const std::int64_t all_pairs = run_.config().micro_batch / 2 * run_.config().grad_accum;
  try {
    result.report = run_micro_batches(lr, preferences ? all_pairs : result.targets);
  } catch (const TrainingError&) {
    run_.sampler->restore(data_before);  // forgets the data of a step that has not been
    throw;
  }
  double sum = 0.0;
  PairSums pairs;
  workers_.visit_results(run_.config().grad_accum, [&](std::span<const float> losses, std::span<const float> of_pairs) {
    sum = std::accumulate(losses.begin(), losses.end(), sum);
    pairs.add(of_pairs);
  });
  result.loss = preferences ? pairs.loss() : sum / static_cast<double>(result.targets);
  if (preferences) result.pairs = pairs.metrics();
  return result;
}

/// Fills tokens, targets and records of the step's micro-batches. Returns how many targets there are.
std::int64_t StepRunner::fill_batches() {
  const std::int64_t at_once = run_.rows_at_once();
  std::int64_t targets = 0;
  for (std::int64_t micro = 0; micro < run_.config().grad_accum; ++micro) {
    const HostBatch batch = workers_.batch(micro);
    for (std::int64_t row = 0; row < run_.config().micro_batch; row += at_once) {
      const MixSampler::Draw draw = run_.sampler->next();
      for (std::int64_t i = 0; i < at_once; ++i) {
        fill_row(batch, row + i, draw.source, at_once * draw.window + i, targets);
      }
    }
  }
  return targets;
}

/// Fills a row of a micro-batch with a window of the data. Adds to `targets`.
void StepRunner::fill_row(const HostBatch& batch, std::int64_t row, std::size_t source, std::int64_t window,
                          std::int64_t& targets) const {
  const auto at = static_cast<std::size_t>(row);
  targets += read_window(*run_.data.sources[source], window,
                         batch.window(at, static_cast<std::size_t>(run_.config().seq_len)));
  if (batch.reference.empty()) return;
  // A reference that the step computes is not known here.
  batch.reference[at] = reference_.training.empty() ? 0.0F : reference_.training[static_cast<std::size_t>(window)];
}

/// Forward and backward over the batches as filled, then the update. The loss is the mean over `terms`, targets or
/// pairs. Blocks until the losses are there.
StepReport StepRunner::run_micro_batches(double lr, std::int64_t terms) {
  PhaseProbe probe(workers_.first().engine(), clock_);  // measures the first rank here: the others do alike
  const int micro_batches = static_cast<int>(run_.config().grad_accum) / workers_.size();
  StepReport of_first;
  workers_.run([&](LoadedModel& member, Rank rank) {
    OffloadEngine& engine = member.engine();
    engine.begin_step(
        {.lr = lr, .max_grad_norm = run_.config().clip, .micro_batches = micro_batches, .gradient_scale = 1.0});
    const bool is_first = rank.index == workers_.first_rank();
    if (is_first) {
      run_passes(member, rank, probe, terms, [&] { probe.begin_forward(member.stream()); });
      clock_.mark(Phase::idle, member.stream());
    } else {
      run_passes(member, rank, engine, terms, [] {});
    }
    const StepReport report = engine.end_step();
    member.wait_for_losses();
    if (is_first) of_first = report;
  });
  return of_first;
}

/// Forward and backward of one rank's micro-batches.
void StepRunner::run_passes(LoadedModel& member, Rank rank, ParameterAccess& parameters, std::int64_t terms,
                            const std::function<void()>& begin_forward) {
  const auto at_once = static_cast<std::size_t>(run_.setup.model->shape().micro_batches);
  const auto all = static_cast<std::size_t>(run_.config().grad_accum) / static_cast<std::size_t>(workers_.size());
  for (std::size_t first = 0; first < all; first += at_once) {
    for (std::size_t i = first; i < std::min(all, first + at_once); ++i) {
      const auto micro = static_cast<std::int64_t>(i) * workers_.size() + rank.index;  // among those of all ranks
      const std::int64_t draw = run_.record.step * run_.config().grad_accum + micro;
      member.set_draw(static_cast<std::int64_t>(i - first), static_cast<std::uint64_t>(draw));
    }
    begin_forward();
    member.train(first, std::min(at_once, all - first), parameters,
                 static_cast<float>(1.0 / static_cast<double>(terms)));
  }
}

}  // namespace tandem
