#include "cli/bench/bench_steps.hpp"

#include <algorithm>
#include <vector>

#include "core/base/median.hpp"
#include "core/base/trace.hpp"
#include "train/report/resource_use.hpp"
#include "train/runtime/stop_signal.hpp"

namespace tandem {

BenchSteps::BenchSteps(RunSetup& run, const TrainConfig& config, const ModelSource& source)
    : config_(config),
      loaded_(run, nullptr),
      clock_(*run.device, run.options.watchdog_seconds),
      vocabulary_(source.config.vocabulary),
      at_once_(static_cast<std::size_t>(run.model->shape().micro_batches)) {
  Parallel& threads = run.device->host_kernels().parallel();
  const ParameterValues values = initial_values(source, run.layout, config.seed, &threads);
  loaded_.engine().initialize(values, initial_codes(source));
}

MeasuredFigures BenchSteps::measure(int steps, bool apart, double dram_rate) {
  std::vector<double> step, forward, backward, exposed;
  const double updated_before = loaded_.engine().counters().update_seconds;
  one(apart);  // fills buffers and touches memory
  double warm_up = 0.0;
  clock_.finish_forward_and_backward(warm_up, warm_up);
  const EngineCounters before = loaded_.engine().counters();
  const double first = trace_now();
  for (int i = 0; i < steps; ++i) {
    const double begin = trace_now();
    exposed.push_back(one(apart));
    step.push_back(trace_now() - begin);
    clock_.finish_forward_and_backward(forward.emplace_back(), backward.emplace_back());
  }
  // An update ends in the step after its own: so many have ended as since the first of these reads.
  const EngineCounters after = loaded_.engine().counters();
  const double seconds = trace_now() - first;
  loaded_.engine().wait();
  const double updated = loaded_.engine().counters().update_seconds - updated_before;
  const auto [shortest, longest] = std::minmax_element(step.begin(), step.end());
  MeasuredFigures f;
  f.steps = steps;
  f.step_seconds = median(step);
  f.forward_seconds = median(forward);
  f.backward_seconds = median(backward);
  f.exposed_update_seconds = median(exposed);
  f.update_seconds = updated / (steps + 1);  // the first step's, too, which ends among the others
  f.tokens_per_second = targets() / f.step_seconds;
  f.spread = (*longest - *shortest) / f.step_seconds;
  f.bound_by = use_between(before, after, seconds, dram_rate).bound_by;
  return f;
}

/// Returns the seconds that the step waited for updates.
double BenchSteps::one(bool apart) {
  if (StopSignal::received() != 0) throw BenchInterrupted{};
  if (apart) loaded_.engine().wait();
  PhaseProbe probe(loaded_.engine(), clock_);
  loaded_.engine().begin_step({.lr = 1e-4,
                               .max_grad_norm = config_.clip,
                               .micro_batches = static_cast<int>(config_.grad_accum),
                               .gradient_scale = 1.0});
  const auto all = static_cast<std::size_t>(config_.grad_accum);
  for (std::size_t first = 0; first < all; first += at_once_) {
    const std::size_t n = std::min(at_once_, all - first);
    for (std::size_t slot = first; slot < first + n; ++slot) {
      const HostBatch batch = loaded_.batch(slot);
      fill(batch.tokens);
      fill(batch.targets);
      std::ranges::fill(batch.reference, 0.0F);
    }
    probe.begin_forward(loaded_.stream());
    loaded_.train(first, n, probe, static_cast<float>(1.0 / targets()));
  }
  clock_.mark(Phase::idle, loaded_.stream());
  const StepReport report = loaded_.engine().end_step();
  loaded_.wait_for_losses();
  return report.exposed_update_seconds;
}

void BenchSteps::fill(std::span<std::int32_t> tokens) {
  constexpr std::uint64_t multiplier = 6364136223846793005U;
  constexpr std::uint64_t increment = 1442695040888963407U;
  for (std::int32_t& token : tokens) {
    state_ = state_ * multiplier + increment;
    token = static_cast<std::int32_t>((state_ >> 33) % static_cast<std::uint64_t>(vocabulary_));
  }
}

}  // namespace tandem
