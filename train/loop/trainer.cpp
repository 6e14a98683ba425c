#include "train/loop/trainer.hpp"

#include <fmt/format.h>
#include <malloc.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <system_error>

#include "api/state_io.hpp"
#include "core/base/error.hpp"
#include "core/base/version.hpp"
#include "core/host/topology.hpp"
#include "io/atomic_file.hpp"
#include "train/config/units.hpp"
#include "train/report/metrics_text.hpp"
#include "train/runtime/stop_signal.hpp"
#include "train/setup/training_data.hpp"

namespace tandem {
namespace {

namespace fs = std::filesystem;

constexpr int skip_limit = 10;  // skipped steps in a row that end a run

/// In trace and profiler.
std::string step_name(std::int64_t step) { return fmt::format("step {}", step); }

/// Checkpoints of later steps than the one resumed from.
bool has_later_checkpoints(const fs::path& root, std::int64_t step) {
  const std::string resumed = checkpoint_name(step);
  std::error_code error;
  for (fs::directory_iterator it(root, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (name.starts_with("step-") && name.size() >= resumed.size() && name > resumed) return true;
  }
  return false;
}

/// One checkpoint, not the newest of a run.
bool names_a_checkpoint(const TrainRequest& request) {
  const fs::path named = request.resume_from;
  return !named.empty() && (is_checkpoint(named) || !fs::is_directory(named / "checkpoints"));
}

}  // namespace

Trainer::Trainer(TrainRequest request) : request_(std::move(request)), config_(request_.config) {
  check_inputs();
  source_ = find_model(config_.model);
  if (config_.from_scratch) {
    source_.weights.clear();
    source_.checkpoint.reset();
  }
  static_cast<void>(sequence_length(config_, source_.config));  // refuses one beyond the positions
  static_cast<void>(recompute_of(config_, source_.config));     // refuses more blocks than there are
  source_.config.validate();
  const ParameterLayout layout = frozen_layout(source_.config, config_.freeze);
  check_weights(source_, layout);
  find_checkpoint();
  if (checkpoint_) check_resumable(*checkpoint_, source_.config, layout);
  open_data();
  resolve();
  take_progress();
  setup_ = set_up_run(config_, source_.config,
                      {.training = true, .saves = !config_.out.empty(), .resumes = checkpoint_ != nullptr});
  check_compute_key();
}

Trainer::~Trainer() = default;

void Trainer::check_inputs() {
  check_config(config_);
  MetricsServer::check_address(config_.metrics_address);
  if (config_.data.empty()) throw UsageError("--data", "missing", "for example --data corpus/");
  if (config_.steps == 0 && config_.epochs == 0.0)
    throw UsageError("--steps", "missing", "for example --steps 1000, or --epochs 1");
  for (const auto& [flag, given] :
       {std::pair("--keep-best", config_.keep_best), {"--eval-every", config_.eval_every > 0}}) {
    if (given && config_.eval_data.empty()) throw UsageError(flag, "there is no --eval-data", "give some");
  }
  if (request_.resume && request_.resume_from.empty() && config_.out.empty()) {
    throw UsageError("--resume", "there is no --out to resume", "give --out, or name a checkpoint");
  }
  if (config_.out.empty()) return;
  refuse_locked(config_.out);
  if (!request_.resume) refuse_held(config_.out);
}

/// The one that was named, or the newest one of a run that looks good, made before a step: what it holds is checked
/// as it is loaded.
void Trainer::find_checkpoint(std::int64_t before) {
  if (!request_.resume) return;
  if (names_a_checkpoint(request_)) {
    checkpoint_ = std::make_unique<Checkpoint>(request_.resume_from, CheckpointCheck::all_but_state);
    return;
  }
  const fs::path root = fs::path(request_.resume_from.empty() ? config_.out : request_.resume_from) / "checkpoints";
  bool passed_over = before != std::numeric_limits<std::int64_t>::max();
  const auto pass_over = [&](const fs::path&, const std::string& why) {
    passed_over = true;
    spdlog::warn("passed over: {}", why);
  };
  checkpoint_ = newest_checkpoint(root, pass_over, {.check = CheckpointCheck::all_but_state, .before = before});
  if (checkpoint_) return;
  if (config_.strict)
    throw InputError("--resume", fmt::format("no good checkpoint in {}", root.string()),
                     "leave out --strict to start fresh");
  spdlog::warn("no {}checkpoint in {}: the run starts fresh", passed_over ? "good " : "", root.string());
}

void Trainer::open_data() {
  data_ = open_tokens(config_.data, config_, source_);
  config_.seq_len = sequence_length(config_, source_.config, *data_);
  windows_ = require_windows(*data_, config_.seq_len, "--data");
  if (config_.eval_data.empty()) return;
  eval_data_ = open_tokens(config_.eval_data, config_, source_, "--eval-data");
  require_windows(*eval_data_, config_.seq_len, "--eval-data");
}

void Trainer::resolve() {
  const std::int64_t per_step = config_.micro_batch * config_.grad_accum;
  if (config_.steps == 0) {
    const double steps = std::ceil(config_.epochs * static_cast<double>(windows_) / static_cast<double>(per_step));
    config_.steps = std::max<std::int64_t>(1, static_cast<std::int64_t>(steps));
    config_.epochs = 0.0;
  }
  if (!config_.lr) config_.lr = source_.loads_weights() ? 2e-5 : 3e-4;
  if (!config_.min_lr) config_.min_lr = *config_.lr / 10.0;
  if (*config_.min_lr > *config_.lr) throw UsageError("--min-lr", "it is above --lr", "give a smaller one");
  schedule_ = {config_.lr_schedule,  *config_.lr,         *config_.min_lr,
               config_.warmup_steps, config_.decay_steps, config_.steps};
}

/// From the checkpoint, or from the beginning.
void Trainer::take_progress() {
  sampler_ = std::make_unique<WindowSampler>(windows_, config_.seed);
  const Manifest beginning;
  const Manifest& m = checkpoint_ ? checkpoint_->manifest() : beginning;
  resumed_from_.reset();
  if (checkpoint_) {
    if ((m.token_kind == "bytes") != data_->bytes()) {
      throw InputError("--data",
                       fmt::format("the checkpoint was trained on {}, this is {}", m.token_kind,
                                   data_->bytes() ? "text" : "token ids"),
                       "resume with the same --data");
    }
    sampler_->restore({m.seed, m.sampler_windows, m.sampler_epoch, m.sampler_position});
    resumed_from_ = m.step;
    check_schedule(m);
  }
  step_ = m.step;
  tokens_ = m.tokens;
  skipped_ = m.skipped_steps;
  first_loss_ = m.first_loss;
  last_loss_ = m.last_loss;
  best_loss_ = m.best_eval_loss;
  best_step_ = m.best_step;
}

/// A cosine over more steps than before, for one, is another from its first step on.
void Trainer::check_schedule(const Manifest& manifest) const {
  if (manifest.step > config_.steps) spdlog::warn("--steps {}: the run has {} already", config_.steps, manifest.step);
  if (manifest.step >= config_.steps) return;  // it goes on by none
  const auto before = Schedule::of_text(manifest.schedule);
  if (!before || schedule_.agrees_with(*before, manifest.step)) return;
  spdlog::warn(
      "the learning rate has followed another schedule so far ({}), and goes on by this one ({}): the run is not one "
      "that had these flags from the start; for a run that can be made longer give it --decay-steps, or --lr-schedule "
      "constant",
      before->brief(), schedule_.brief());
}

void Trainer::check_compute_key() const {
  if (!checkpoint_ || checkpoint_->manifest().compute_key == setup_.compute_key()) return;
  const std::string why = fmt::format("checkpoint {} was made with another compute_key ({})",
                                      checkpoint_->directory().string(), checkpoint_->manifest().compute_key);
  if (config_.strict) throw InputError("--strict", why, "resume where it was made");
  spdlog::warn("{}: the run goes on, but its bits may differ", why);
}

std::string Trainer::plan_text() const {
  const std::size_t host = read_topology().memory_bytes;
  return fmt::format("tandem {} | {}, {} parameters | {}, ceiling {} | host {}\n{}{}", version,
                     setup_.model_config.name, format_count(setup_.layout.parameter_count()), setup_.device_names(),
                     format_bytes(setup_.plan.device_memory), host == 0 ? "unknown" : format_bytes(host),
                     setup_.table(), setup_.saving.text());
}

int Trainer::run() {
  progress_ = std::make_unique<Progress>(config_.steps, config_.log_every, request_.quiet);
  std::string text = plan_text();
  text.pop_back();
  progress_->line(text);
  if (!source_.loads_weights() && !checkpoint_) progress_->line("random weights: the model starts from scratch");
  if (config_.policy.kind == Policy::Kind::automatic && !setup_.prediction) {
    spdlog::info(
        "--policy auto: this machine is not calibrated, so as much as fits is on the device; `tandem calibrate` "
        "lets it choose the predicted fastest");
  }
  if (config_.out.empty()) spdlog::warn("no --out: nothing of this run is saved");
  const StopSignal signals;
  start();
  try {
    while (step_ < config_.steps && StopSignal::received() == 0) {
      train_step();
      look_after_saving();
    }
    if (eval_data_ && evaluated_step_ != step_) evaluate();  // where there was no step to take
    const bool done = step_ >= config_.steps && (!eval_data_ || evaluated_step_ == step_);
    const int signal = done ? 0 : StopSignal::received();
    finish(signal != 0);
    return signal;
  } catch (const StalledError& error) {
    spdlog::warn("{}", error.what());  // now: what has stalled, a disk perhaps, may hold up the end of the run too
    throw;
  } catch (const TrainingError&) {
    save_best_effort();
    throw;
  }
}

void Trainer::start() {
  if (config_.metrics_port >= 0) {
    metrics_server_ = std::make_unique<MetricsServer>(config_.metrics_address, config_.metrics_port);
    progress_->line(fmt::format("metrics at {}", metrics_server_->url()));
  }
  if (!config_.trace.empty()) {
    require_writable(config_.trace);
    trace_ = std::make_unique<Trace>(fs::path(config_.trace).parent_path());
  }
  workers_ = std::make_unique<RankWorkers>(setup_, trace_.get());
  clock_ = std::make_unique<PhaseClock>(*setup_.device, setup_.options.watchdog_seconds);
  if (!config_.out.empty()) directory_ = std::make_unique<RunDirectory>(config_.out, !request_.resume);
  load_weights();  // it decides at which step the run begins
  if (directory_) open_files();
  if (setup_.may_replan()) {
    const RunPrediction& p = *setup_.prediction;
    replanner_ = std::make_unique<Replanner>(setup_.layout, setup_.options, setup_.facts, p.profile, p.compute,
                                             setup_.plan, p.choice.simulation);
  }
}

void Trainer::open_files() {
  saver_ = std::make_unique<CheckpointSaver>(workers_->engines(),
                                             SaverOptions{.root = directory_->checkpoints(),
                                                          .keep = config_.keep,
                                                          .copies = setup_.saving.copies,
                                                          .on_failure = config_.on_save_failure,
                                                          .beside = source_.beside,
                                                          .predict = predictor(),
                                                          .urgent = [] { return StopSignal::received() != 0; }},
                                             [this](const std::string& text) { progress_->line(text); });
  if (best_step_ > 0) saver_->set_best(directory_->checkpoints() / checkpoint_name(best_step_));
  const bool branches = resumed_from_ && names_a_checkpoint(request_);  // else what is later is damaged
  if (branches && has_later_checkpoints(directory_->checkpoints(), step_)) discard_later_checkpoints();
  // One that takes no step may be without the flags of those that did.
  if (step_ < config_.steps || !directory_->has_config()) directory_->write_config(config_toml(config_));
  directory_->open_metrics(step_);
}

/// Empty where the machine is not calibrated.
std::function<std::optional<SaveSlowdown>(const Plan&, double)> Trainer::predictor() const {
  if (!setup_.prediction) return {};
  return [&run = setup_, &known = *setup_.prediction](const Plan& plan, double disk) {
    return predict_saving(run.saving, run.layout, plan, known.profile, known.compute, disk);
  };
}

void Trainer::load_weights() {
  while (checkpoint_ && !load_checkpoint()) {
    find_checkpoint(checkpoint_->manifest().step);
    if (checkpoint_) check_resumable(*checkpoint_, source_.config, setup_.layout);
    take_progress();
    check_compute_key();
  }
  if (!checkpoint_) {
    workers_->run([&](LoadedModel& member, Rank) {
      Parallel& threads = member.device().host_kernels().parallel();
      member.engine().initialize(initial_values(source_, setup_.layout, config_.seed, &threads));
    });
  }
  checkpoint_.reset();
  ::malloc_trim(0);  // glibc keeps freed blocks; those that tensors came in through are done with
  sample_process_memory();
}

/// Returns whether it was what its writer had saved; one that was named must be.
bool Trainer::load_checkpoint() {
  const double begin = trace_now();
  try {
    load_state(workers_->engines(), *checkpoint_);
  } catch (const InputError& error) {
    if (names_a_checkpoint(request_)) throw;
    spdlog::warn("passed over: {}", error.what());
    return false;
  }
  progress_->line(fmt::format("resumed from {} at step {} ({} in {:.2f} s)", checkpoint_->directory().string(), step_,
                              format_bytes(StateCopy::bytes(setup_.layout)), trace_now() - begin));
  if (directory_ && checkpoint_->directory().parent_path() == directory_->checkpoints()) saved_step_ = step_;
  return true;
}

/// Tokens and targets of the step's micro-batches. Returns how many targets there are.
std::int64_t Trainer::fill_batches() {
  const auto length = static_cast<std::size_t>(config_.seq_len);
  std::int64_t targets = 0;
  for (std::int64_t micro = 0; micro < config_.grad_accum; ++micro) {
    const HostBatch batch = workers_->batch(micro);
    for (std::int64_t row = 0; row < config_.micro_batch; ++row) {
      const auto at = static_cast<std::size_t>(row) * length;
      targets +=
          read_window(*data_, sampler_->next(), batch.tokens.subspan(at, length), batch.targets.subspan(at, length));
    }
  }
  return targets;
}

/// Forward and backward over the batches as filled, then the update. Blocks until the losses are there.
StepReport Trainer::run_micro_batches(double lr, std::int64_t targets) {
  PhaseProbe probe(workers_->first().engine(), *clock_);  // of the first rank: the others do alike
  const int micro_batches = static_cast<int>(config_.grad_accum) / workers_->size();
  StepReport of_first;
  workers_->run([&](LoadedModel& member, Rank rank) {
    OffloadEngine& engine = member.engine();
    engine.begin_step({.lr = lr, .max_grad_norm = config_.clip, .micro_batches = micro_batches, .gradient_scale = 1.0});
    if (rank.index == 0) {
      run_passes(member, probe, targets, [&] { probe.begin_forward(member.stream()); });
      clock_->mark(Phase::idle, member.stream());
    } else {
      run_passes(member, engine, targets, [] {});
    }
    const StepReport report = engine.end_step();
    member.wait_for_losses();
    if (rank.index == 0) of_first = report;
  });
  return of_first;
}

/// Forward and backward of one rank's micro-batches.
void Trainer::run_passes(LoadedModel& member, ParameterAccess& parameters, std::int64_t targets,
                         const std::function<void()>& begin_forward) {
  const auto at_once = static_cast<std::size_t>(setup_.model->shape().micro_batches);
  const auto all = static_cast<std::size_t>(config_.grad_accum) / static_cast<std::size_t>(workers_->size());
  for (std::size_t first = 0; first < all; first += at_once) {
    begin_forward();
    member.train(first, std::min(at_once, all - first), parameters,
                 static_cast<float>(1.0 / static_cast<double>(targets)));
  }
}

double Trainer::sum_of_losses() const {
  double sum = 0.0;
  for (std::int64_t micro = 0; micro < config_.grad_accum; ++micro) {
    const auto losses = workers_->batch(micro).losses;
    sum = std::accumulate(losses.begin(), losses.end(), sum);
  }
  return sum;
}

void Trainer::train_step() {
  const double begin = trace_now();
  StepMetrics metrics;
  metrics.step = step_ + 1;
  if (RangeSink* ranges = setup_.device->ranges()) step_range_ = {*ranges, "steps", step_name(metrics.step)};
  metrics.lr = schedule_.at(metrics.step);
  const WindowSampler::State data_before = sampler_->state();
  const std::int64_t targets = fill_batches();
  StepReport report;
  report.skipped = true;
  if (targets > 0) {
    try {
      report = run_micro_batches(metrics.lr, targets);
    } catch (const TrainingError&) {
      sampler_->restore(data_before);  // of a step that has not been
      throw;
    }
    metrics.loss = sum_of_losses() / static_cast<double>(targets);
  } else {
    // Nothing to learn from: an update by momentum and decay alone would leave a trace.
    metrics.loss = report.gradient_norm = std::numeric_limits<double>::quiet_NaN();
  }
  metrics.grad_norm = report.gradient_norm;
  metrics.skipped = report.skipped;
  ++step_;
  tokens_ += targets;
  if (step_ == config_.steps) workers_->wait();  // the last step has no successor to hide its update
  account_step(std::move(metrics), report, targets, begin);
  if (targets > 0) {
    watch_nonfinite(report);
  } else {
    ++skipped_;
    spdlog::warn("step {} skipped: its windows hold no target", step_);
  }
}

void Trainer::account_step(StepMetrics metrics, const StepReport& report, std::int64_t targets, double begin) {
  double forward = 0.0;
  double backward = 0.0;
  clock_->finish_forward_and_backward(forward, backward);
  const EngineCounters counters = workers_->first().engine().counters();
  metrics.step_seconds = trace_now() - begin;
  step_range_.end();
  times_.step.push_back(metrics.step_seconds);
  maybe_replan(counters);
  times_.forward.push_back(forward);
  times_.backward.push_back(backward);
  times_.update.push_back(counters.update_seconds - counters_seen_.update_seconds);
  times_.exposed.push_back(report.exposed_update_seconds);
  metrics.exposed_update_seconds = report.exposed_update_seconds;
  metrics.use = use_between(counters_seen_, counters, metrics.step_seconds,
                            setup_.prediction ? setup_.prediction->profile.dram.value : 0.0);
  metrics.tokens_per_second = static_cast<double>(targets) / metrics.step_seconds;
  times_.rate.push_back(metrics.tokens_per_second);
  metrics.device_bytes = setup_.device->allocated_bytes();
  if (std::isfinite(metrics.loss)) {
    if (!first_loss_) first_loss_ = metrics.loss;
    last_loss_ = metrics.loss;
  }
  const bool due = config_.eval_every > 0 && step_ % config_.eval_every == 0;
  if (eval_data_ && (due || step_ == config_.steps)) {
    evaluate();
    if (evaluated_step_ == step_) metrics.eval_loss = eval_loss_;
  }
  if (trace_) trace_->span("steps", step_name(step_), begin, begin + metrics.step_seconds);
  counters_seen_ = workers_->first().engine().counters();  // an evaluation's fetches are no step's
  sample_process_memory();
  if (saver_) saver_->note_step(metrics.step_seconds);
  progress_->step(metrics, saver_ ? saver_->progress() : std::nullopt);
  if (directory_) directory_->append(metrics);
  publish(metrics);
}

/// Where the machine is not as fast as its calibration has it, another division may be: state moves, no bit changes.
void Trainer::maybe_replan(const EngineCounters& counters) {
  if (!replanner_ || step_ == config_.steps) return;
  const auto change = replanner_->after_step(rates_between(counters_seen_, counters));
  if (!change) return;
  workers_->first().engine().adopt(change->plan);
  setup_.plan = change->plan;
  progress_->line(
      fmt::format("step {}: rates are not as calibrated; another plan ({}), predicted {:.4g} s/step instead "
                  "of {:.4g}",
                  step_, change->plan.policy.text(), change->seconds_after, change->seconds_before));
}

void Trainer::watch_nonfinite(const StepReport& report) {
  skipped_in_a_row_ = report.skipped ? skipped_in_a_row_ + 1 : 0;
  if (!report.skipped) return;
  ++skipped_;
  spdlog::warn("step {} skipped: its gradient norm is not finite", step_);
  const std::string resume = directory_ ? "resume from the last checkpoint with a smaller --lr" : "use a smaller --lr";
  if (skipped_in_a_row_ >= skip_limit) {
    throw TrainingError(fmt::format("step {}", step_),
                        fmt::format("{} steps in a row without a finite gradient norm", skip_limit), resume);
  }
}

/// A signal breaks it off: the state is to be saved, and is there to be validated another time.
void Trainer::evaluate() {
  const auto result = workers_->evaluate(*eval_data_, [] { return StopSignal::received() != 0; });
  if (!result) return;
  eval_loss_ = result->loss;
  evaluated_step_ = step_;
}

void Trainer::publish(const StepMetrics& metrics) {
  if (!metrics_server_) return;
  metrics_server_->publish(prometheus_text({.metrics = metrics,
                                            .steps = config_.steps,
                                            .tokens = tokens_,
                                            .skipped = skipped_,
                                            .eval_loss = eval_loss_,
                                            .model = setup_.model_config.name,
                                            .device = setup_.device_names()}));
}

void Trainer::finish(bool interrupted) {
  save_at_the_end();
  const std::string digest = workers_->state_digest();
  if (directory_) {
    const std::string before = times_.step.empty() ? summary_of_the_steps(digest) : "";
    directory_->write_summary(before.empty() ? summary(digest) : before);
  }
  if (trace_) trace_->write(config_.trace);
  if (interrupted) progress_->line(fmt::format("stopped by a signal after step {}", step_));
  progress_->line(fmt::format("state_digest {}", digest));
}

}  // namespace tandem
