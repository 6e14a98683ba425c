#include "train/loop/step_loop.hpp"

#include <fmt/format.h>
#include <malloc.h>
#include <spdlog/spdlog.h>
#include <algorithm>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>

#include "core/base/error.hpp"
#include "core/host/topology.hpp"
#include "io/atomic_file.hpp"
#include "offload/engine/state_io.hpp"
#include "train/config/units.hpp"
#include "train/loop/resume_point.hpp"
#include "train/loop/run_paths.hpp"
#include "train/loop/shared_folder.hpp"
#include "train/report/next_commands.hpp"
#include "train/runtime/stop_signal.hpp"

namespace tandem {
namespace {

namespace fs = std::filesystem;

constexpr int skip_limit = 10;  // skipped steps in a row that end a run

/// Name of a step in trace and profiler.
std::string step_name(std::int64_t step) { return fmt::format("step {}", step); }

std::unique_ptr<Trace> open_trace(const std::string& path) {
  if (path.empty()) return nullptr;
  require_writable(path);
  return std::make_unique<Trace>(std::filesystem::path(path).parent_path());
}

/// Null where nothing is saved, or another process does it.
std::unique_ptr<RunDirectory> open_directory(const PreparedRun& run) {
  const std::string& out = run.config().out;
  return out.empty() || !run.processes->is_first() ? nullptr : std::make_unique<RunDirectory>(out, !run.request.resume);
}

double dram_rate(const RunSetup& setup) { return setup.prediction ? setup.prediction->profile.dram.value : 0.0; }

/// How a model of tokens is asked, by the files that came with it.
PromptKind prompt_of(const ModelSource& source) {
  const auto has = [&](std::string_view name) {
    return std::ranges::any_of(source.beside, [&](const FileBeside& file) { return file.name == name; });
  };
  if (!has("tokenizer.json")) return PromptKind::ids;
  return has("chat_template.jinja") || has("chat_template.json") ? PromptKind::chat : PromptKind::text;
}

}  // namespace

StepLoop::StepLoop(PreparedRun& run, RunOutput& output)
    : run_(run),
      output_(output),
      trace_(open_trace(run.processes->is_first() ? run.config().trace : "")),
      workers_(run.setup, trace_.get()),
      runner_(run, workers_, reference_),
      statistics_(dram_rate(run.setup)) {
  run.processes->or_fail([this] { begin(); });  // before memory goes that others wait for
}

void StepLoop::begin() {
  directory_ = open_directory(run_);
  if (run_.processes->several() && saves()) open_ranks_folder();
  const bool saved = load_weights();  // it decides at which step the run begins
  checkpoints_ = std::make_unique<CheckpointPolicy>(run_, workers_, directory_.get(), saved,
                                                    [this](const std::string& text) { output_.line(text); });
  if (saves()) open_files();
  const RunSetup& setup = run_.setup;
  if (!setup.may_replan()) return;
  const RunPrediction& p = *setup.prediction;
  replanner_ = std::make_unique<Replanner>(setup.layout, setup.options, setup.facts, p.profile, p.compute, setup.plan,
                                           p.choice.simulation);
}

/// Returns whether the state is that of a checkpoint in the run's own folder.
bool StepLoop::load_weights() {
  bool saved = false;
  const bool needs_base = run_.setup.saved_state() == SavedState::trained;
  if (needs_base) initialize();
  while (run_.checkpoint && !load_checkpoint()) {
    run_.pass_over_checkpoint();
    if (needs_base && !run_.checkpoint) initialize();  // part of it may have been loaded
  }
  if (run_.checkpoint) {
    resumed_ = run_.checkpoint->directory().parent_path().parent_path();
    saved = saves() && run_.checkpoint->directory().parent_path() == fs::path(run_.config().out) / "checkpoints";
  } else if (!needs_base) {
    initialize();
  }
  run_.checkpoint.reset();
  run_.source.close_weights();
  ::malloc_trim(0);  // glibc keeps freed blocks; those that tensors came in through are done with
  sample_process_memory();
  return saved;
}

/// Codes of parameters whose files have them already. Their values pass through `values` all the same, which notes
/// their hashes; null: they do not.
OffloadEngine::Codes StepLoop::taken_over(const ParameterValues* values) const {
  return [codes = initial_codes(run_.source), values](const Parameter& p, CodeSink& sink) {
    if (!codes(p, sink)) return false;
    if (values == nullptr) return true;
    std::vector<float> passing(std::size_t{1} << 18);
    for (std::int64_t first = 0; first < p.count; first += std::ssize(passing)) {
      passing.resize(static_cast<std::size_t>(std::min(std::ssize(passing), p.count - first)));
      (*values)(p, first, passing);
    }
    return true;
  };
}

/// Gives the model its first values, and notes the hashes of those that checkpoints leave out.
void StepLoop::initialize() {
  const bool notes = run_.setup.saved_state() == SavedState::trained;
  workers_.run([&](LoadedModel& member, Rank rank) {
    Parallel& threads = member.device().host_kernels().parallel();
    ParameterValues values = initial_values(run_.source, run_.setup.layout, run_.config().seed, &threads);
    if (!notes || rank.index != workers_.first_rank()) return member.engine().initialize(values, taken_over(nullptr));
    BaseHashes& hashes = run_.base_hashes;
    values = hashing(
        std::move(values), [](const Parameter& p) { return !p.options.trainable; },
        [&](const Parameter& p, const std::string& hash) {
          (p.coded() ? hashes.original : hashes.stored)[p.full_name] = hash;
        });
    member.engine().initialize(values, taken_over(&values));
    for (const Parameter* p : run_.setup.layout.owned_parameters()) {
      if (p->coded()) hashes.stored[p->full_name] = member.engine().code_hash(*p);
    }
  });
}

/// Returns whether it was what its writer had saved; one that was named must be.
bool StepLoop::load_checkpoint() {
  const double begin = trace_now();
  check_base(*run_.checkpoint, run_.base_hashes);
  bool good = true;
  try {
    load_state(workers_.engines(), *run_.checkpoint);
  } catch (const InputError& error) {
    if (names_a_checkpoint(run_.request)) throw;
    spdlog::warn("passed over: {}", error.what());
    good = false;
  }
  if (!run_.processes->all("checkpoint", good)) return false;
  output_.line(fmt::format("resumed from {} at step {} ({} in {:.2f} s)", run_.checkpoint->directory().string(),
                           run_.record.step,
                           format_bytes(StateCopy::bytes(run_.setup.layout, run_.checkpoint->manifest().optimizer,
                                                         run_.setup.saved_state())),
                           trace_now() - begin));
  return true;
}

/// Opens the logs of several processes, after each has seen there what the first one wrote.
void StepLoop::open_ranks_folder() {
  const fs::path folder = fs::path(run_.config().out) / "ranks";
  share_folder(folder, *run_.processes);
  run_.log->open(folder, run_.processes->rank().index);
}

void StepLoop::open_files() {
  const std::int64_t step = run_.record.step;
  const bool branches = run_.record.resumed_from && names_a_checkpoint(run_.request);  // else what is later is damaged
  const bool discards = branches && directory_ && has_later_checkpoints(directory_->checkpoints(), step);
  if (branches && run_.processes->of_first("later checkpoints", discards)) checkpoints_->discard_later_checkpoints();
  if (!directory_) return;
  // One that takes no step may be without the flags of those that did.
  if (step < run_.config().steps || !directory_->has_config()) {
    directory_->write_config(config_toml(with_absolute_paths(run_.config())));
  }
  directory_->open_metrics(step);
  directory_->add_command(step, run_.request.command, !run_.request.resume);
}

/// Returns whether the reference of DPO is there, or none is needed: a signal may end its passes.
bool StepLoop::take_reference() {
  if (run_.config().objective != Objective::dpo) return true;
  const ReferenceFolders folders{run_.config().out, run_.record.resumed_from ? resumed_ : std::filesystem::path()};
  auto found = find_reference(run_, workers_, folders, [this](const std::string& text) { output_.line(text); });
  if (found) take_reference_adapters(run_, workers_, folders);
  if (found) reference_ = std::move(*found);
  statistics_.begin_step(workers_.first().engine().counters());  // its passes are no step's
  return found.has_value();
}

int StepLoop::run() {
  const RunRecord& record = run_.record;
  try {
    if (!take_reference()) {
      output_.line("stopped by a signal before the first step");
      return stopped();
    }
    make_up_evaluation();
    if (record.resumed_from && done()) say_finished();
    while (!done() && stopped() == 0) {
      train_step();
      checkpoints_->after_step();
    }
    if (run_.eval_data && !record.evaluated()) evaluate();  // only where there was no step to take
    const bool complete = done() && (!run_.eval_data || record.evaluated());
    const int signal = complete ? 0 : stopped();
    finish(signal != 0);
    return signal;
  } catch (const StalledError& error) {
    spdlog::warn("{}", error.what());  // now: what has stalled, a disk perhaps, may hold up the end of the run too
    throw;
  } catch (const TrainingError&) {
    checkpoints_->save_best_effort();
    throw;
  }
}

/// The signal by which the run is to end, wherever it came; 0: none.
int StepLoop::stopped() {
  if (signal_ != 0) return signal_;
  for (const std::string& received : run_.processes->gather("signals", std::to_string(StopSignal::received()))) {
    if (signal_ == 0) signal_ = std::stoi(received);
  }
  return signal_;
}

void StepLoop::train_step() {
  const double begin = trace_now();
  RunRecord& record = run_.record;
  StepMetrics metrics;
  metrics.step = record.step + 1;
  if (RangeSink* ranges = run_.setup.device->ranges()) step_range_ = {*ranges, "steps", step_name(metrics.step)};
  metrics.lr = run_.schedule.at(metrics.step);
  const StepResult result = runner_.step(metrics.lr);
  metrics.loss = result.loss;
  metrics.grad_norm = result.report.gradient_norm;
  metrics.skipped = result.report.skipped;
  metrics.pairs = result.pairs;
  ++record.step;
  record.tokens += result.targets;
  if (record.step == run_.config().steps) workers_.wait();  // the last step has no successor to hide its update
  end_step(std::move(metrics), result, begin);
  if (result.targets > 0) {
    watch_nonfinite(result.report);
  } else {
    ++record.skipped;
    spdlog::warn("step {} skipped: its windows hold no target", record.step);
  }
}

/// Takes down what a step took, evaluates where that is due, and tells of it.
void StepLoop::end_step(StepMetrics metrics, const StepResult& result, double begin) {
  RunRecord& record = run_.record;
  double forward = 0.0;
  double backward = 0.0;
  runner_.finish_forward_and_backward(forward, backward);
  const EngineCounters counters = workers_.first().engine().counters();
  metrics.step_seconds = trace_now() - begin;
  step_range_.end();
  maybe_replan(counters);
  statistics_.note_step(metrics, result, forward, backward, counters);
  metrics.device_bytes = run_.setup.device->allocated_bytes();
  if (std::isfinite(metrics.loss)) {
    if (!record.first_loss) record.first_loss = metrics.loss;
    record.last_loss = metrics.loss;
    record.last_pairs = metrics.pairs;
  }
  if (evaluation_due()) {
    evaluate();
    if (record.evaluated()) metrics.eval_loss = record.eval_loss, metrics.eval_pairs = record.eval_pairs;
  }
  if (trace_) trace_->span("steps", step_name(record.step), begin, begin + metrics.step_seconds);
  statistics_.begin_step(workers_.first().engine().counters());  // an evaluation's fetches are no step's
  sample_process_memory();
  checkpoints_->note_step(metrics.step_seconds);
  output_.step(metrics, checkpoints_->progress(), directory_.get());
}

/// Changes the plan where the machine is not as fast as its calibration and another division may be faster: state
/// moves, no bit changes.
void StepLoop::maybe_replan(const EngineCounters& counters) {
  const std::int64_t step = run_.record.step;
  if (!replanner_ || step == run_.config().steps) return;
  const auto change =
      replanner_->after_step(rates_between(statistics_.before(), counters, run_.setup.plan.counts_on_speculation()));
  if (!change) return;
  workers_.first().engine().adopt(change->plan);
  run_.setup.plan = change->plan;
  output_.line(
      fmt::format("step {}: rates are not as calibrated; another plan ({}), predicted {:.4g} s/step instead "
                  "of {:.4g}",
                  step, change->plan.policy.text(), change->seconds_after, change->seconds_before));
}

void StepLoop::watch_nonfinite(const StepReport& report) {
  skipped_in_a_row_ = report.skipped ? skipped_in_a_row_ + 1 : 0;
  if (!report.skipped) return;
  RunRecord& record = run_.record;
  ++record.skipped;
  spdlog::warn("step {} skipped: its gradient norm is not finite", record.step);
  const std::string resume = saves() ? "resume from the last checkpoint with a smaller --lr" : "use a smaller --lr";
  if (skipped_in_a_row_ >= skip_limit) {
    throw TrainingError(step_name(record.step),
                        fmt::format("{} steps in a row without a finite gradient norm", skip_limit), resume);
  }
}

bool StepLoop::evaluation_due() const {
  const TrainConfig& config = run_.config();
  const std::int64_t step = run_.record.step;
  const bool due = config.eval_every > 0 && step % config.eval_every == 0;
  return run_.eval_data && (due || step == config.steps);
}

/// A signal breaks it off: the state is to be saved, and is there to be validated another time.
void StepLoop::evaluate() {
  const auto result = workers_.evaluate(
      *run_.eval_data, [] { return StopSignal::received() != 0; }, reference_.evaluation);
  if (!result) return;
  run_.record.note_evaluation(result->loss);
  run_.record.eval_pairs = result->pairs;
}

/// The evaluation of the state that a run goes on from, where a signal had broken it off: what follows from it is as in
/// a run that was not interrupted.
void StepLoop::make_up_evaluation() {
  const TrainConfig& config = run_.config();
  const RunRecord& record = run_.record;
  if (!record.resumed_from || (config.patience == 0 && !config.keep_best)) return;
  if (!evaluation_due() || record.counted_evaluation == record.step) return;
  evaluate();
  checkpoints_->after_step();
}

bool StepLoop::out_of_patience() const {
  const std::int64_t patience = run_.config().patience;
  return patience > 0 && run_.eval_data && run_.record.evaluations_without_gain >= patience;
}

bool StepLoop::done() const { return run_.record.step >= run_.config().steps || out_of_patience(); }

EndReason StepLoop::end_reason(bool interrupted) const {
  if (interrupted) return EndReason::signal;
  return run_.record.step >= run_.config().steps ? EndReason::steps : EndReason::patience;
}

void StepLoop::finish(bool interrupted) {
  checkpoints_->save_at_the_end();
  const std::string digest = workers_.state_digest(run_.setup.saved_state(), run_.base_hashes.stored);
  const RankTotals totals = workers_.totals();
  if (directory_) {
    std::string text;
    const EndReason reason = end_reason(interrupted);
    if (statistics_.empty()) text = summary_of_earlier_steps(directory_->summary(), run_.record, digest, reason);
    if (text.empty()) text = summary_json(run_, statistics_.summary(), totals, digest, reason);
    directory_->write_summary(text);
  }
  if (trace_) trace_->write(run_.config().trace);
  say_why_it_ends(interrupted);
  output_.line(fmt::format("state_digest {}", digest));
  if (directory_) say_what_next(interrupted);
}

/// A run that is resumed, but had taken all its steps.
void StepLoop::say_finished() {
  if (end_reason(false) == EndReason::patience) return;  // say_why_it_ends does
  output_.line(
      fmt::format("finished: all {} steps of this run are taken and none is left; a larger {} goes on beyond them",
                  run_.record.step, run_.length_flag()));
}

void StepLoop::say_why_it_ends(bool interrupted) {
  const RunRecord& record = run_.record;
  const std::int64_t steps = run_.config().steps;
  if (interrupted) {
    output_.line(fmt::format("stopped by a signal after step {} of {}", record.step, steps));
  } else if (end_reason(false) == EndReason::patience) {
    output_.line(
        fmt::format("ended by --patience after step {} of {}: {} evaluations in a row without a lower loss{}; a "
                    "larger --patience goes on",
                    record.step, steps, record.evaluations_without_gain,
                    record.lowest_eval_loss ? fmt::format(" than {:.4f}", *record.lowest_eval_loss) : std::string()));
  }
}

void StepLoop::say_what_next(bool interrupted) {
  if (std::getenv("TANDEM_NO_NEXT") != nullptr) return;  // the program that called this one says it
  const RunRecord& record = run_.record;
  const EndedRun ended{.program = run_.request.program,
                       .out = run_.config().out,
                       .prompt = run_.data.bytes() ? PromptKind::text : prompt_of(run_.source),
                       .step = record.step,
                       .best_step = record.best_step,
                       .best_loss = record.best_loss};
  output_.line(interrupted ? "to go on:\n  " + resume_command(ended) : commands_after(ended));
}

}  // namespace tandem
