#include "cli/bench/bench_steps.hpp"

#include <algorithm>
#include <vector>

#include "core/base/median.hpp"
#include "core/base/trace.hpp"
#include "train/report/resource_use.hpp"
#include "train/runtime/stop_signal.hpp"

namespace tandem {
namespace {

/// The step of the median time, as a whole: its parts are those of one step.
template <class Watched>
Watched middle_of(std::vector<Watched> steps) {
  const auto middle = steps.begin() + static_cast<std::ptrdiff_t>(steps.size() / 2);
  std::ranges::nth_element(steps, middle, {}, &Watched::seconds);
  return *middle;
}

}  // namespace

BenchSteps::BenchSteps(RunSetup& run, const TrainConfig& config, const ModelSource& source, Trace* trace)
    : run_(run),
      config_(config),
      loaded_(run, trace),
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

MeasuredStep BenchSteps::measure_modules(int steps, Trace& trace) {
  ModuleClock clock(*run_.device, run_.options.watchdog_seconds);
  ModuleOps ops(run_.device->ops(), clock, run_.model_config);
  MeasuredStep m;
  std::vector<double> step, compute;
  std::vector<WatchedStep> watched_steps;
  double since = 0.0;
  for (int i = 0; i <= steps; ++i) {
    step.push_back(unwatched(compute.emplace_back()));
    watched_steps.push_back(watched(ops, clock));
    if (i > 0) continue;
    for (auto* of_warm_up : {&step, &compute}) of_warm_up->clear();
    watched_steps.clear();
    loaded_.engine().wait();  // updates of these steps do not count, and those of the last ones do
    since = trace_now();
  }
  m.steps = steps;
  m.step_seconds = median(step);
  m.compute_seconds = median(compute);
  const WatchedStep middle = middle_of(std::move(watched_steps));
  m.parts = middle.parts;
  m.watched_seconds = middle.seconds;
  loaded_.engine().wait();
  m.tasks = trace.totals(since);
  m.traced_steps = 2 * steps;
  return m;
}

/// Returns the seconds of a step. `compute`: those of the model's work in it, without waits.
double BenchSteps::unwatched(double& compute) {
  const double busy = loaded_.engine().counters().busy.compute, begin = trace_now();
  one(false);
  const double seconds = trace_now() - begin;
  double ignored = 0.0;
  clock_.finish_forward_and_backward(ignored, ignored);
  compute = loaded_.engine().counters().busy.compute - busy;
  return seconds;
}

BenchSteps::WatchedStep BenchSteps::watched(ModuleOps& ops, ModuleClock& clock) {
  ModuleProbe probe(loaded_.engine(), run_.layout, ops, clock);
  const double begin = trace_now();
  clock.begin_pass(/*backward=*/false);
  clock.begin(other_part, loaded_.stream());
  run_.model->compute_with(ops);
  step(probe, [&] { clock.begin(other_part, loaded_.stream()); });
  run_.model->compute_with(run_.device->ops());
  clock.begin(end_part, loaded_.stream());
  StreamFigures parts = clock.take();
  return {trace_now() - begin, parts};
}

/// Returns the seconds that the step waited for updates.
double BenchSteps::one(bool apart) {
  if (apart) loaded_.engine().wait();
  PhaseProbe probe(loaded_.engine(), clock_);
  return step(probe, [&] { clock_.mark(Phase::idle, loaded_.stream()); }).exposed_update_seconds;
}

template <class Probe>
StepReport BenchSteps::step(Probe& probe, const std::function<void()>& end_of_backward) {
  if (StopSignal::received() != 0) throw BenchInterrupted{};
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
  end_of_backward();
  const StepReport report = loaded_.engine().end_step();
  loaded_.wait_for_losses();
  return report;
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
