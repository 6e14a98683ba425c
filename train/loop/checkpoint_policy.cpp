#include "train/loop/checkpoint_policy.hpp"

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <utility>

#include "core/base/error.hpp"
#include "core/base/version.hpp"
#include "io/atomic_file.hpp"
#include "io/checkpoint.hpp"
#include "models/hf/hf_config.hpp"
#include "train/hf/peft_config.hpp"
#include "train/loop/run_paths.hpp"
#include "train/runtime/stop_signal.hpp"

namespace tandem {

CheckpointPolicy::CheckpointPolicy(PreparedRun& run, RankWorkers& workers, RunDirectory* directory, bool saved,
                                   std::function<void(const std::string&)> say)
    : run_(run),
      workers_(workers),
      directory_(directory),
      say_(std::move(say)),
      saved_step_(saved ? run.record.step : -1) {
  if (run.config().out.empty()) return;
  saver_ = std::make_unique<CheckpointSaver>(workers.engines(),
                                             SaverOptions{.root = root(),
                                                          .keep = run.config().keep,
                                                          .copies = run.setup.saving.copies,
                                                          .writes = directory != nullptr,
                                                          .ranks_elsewhere = run.processes->several(),
                                                          .on_failure = run.config().on_save_failure,
                                                          .saved = run.setup.saved_state(),
                                                          .elsewhere = run.base_hashes.stored,
                                                          .original = run.base_hashes.original,
                                                          .beside = run.source.beside,
                                                          .predict = predictor(),
                                                          .urgent = [] { return StopSignal::received() != 0; }},
                                             say_);
  const std::int64_t best = run.record.best_step;
  if (best > 0) saver_->set_best(root() / checkpoint_name(best));
}

std::filesystem::path CheckpointPolicy::root() const {
  return std::filesystem::path(run_.config().out) / "checkpoints";
}

/// Empty where the machine is not calibrated.
std::function<std::optional<SaveSlowdown>(const Plan&, double)> CheckpointPolicy::predictor() const {
  if (!run_.setup.prediction) return {};
  return [&setup = run_.setup, &known = *run_.setup.prediction](const Plan& plan, double disk) {
    return predict_saving(setup.saving, setup.layout, plan, known.profile, known.compute, disk);
  };
}

Manifest CheckpointPolicy::manifest() const {
  Manifest m;
  m.tandem_version = version;
  m.model_name = run_.setup.model_config.name;
  m.model_config = hf_config_text(run_.setup.model_config, "float32");
  m.token_kind = run_.data.bytes() ? "bytes" : "ids";
  m.compute_key = run_.setup.compute_key();
  m.schedule = run_.schedule.text();
  m.plan = run_.setup.plan.outline_json();
  if (run_.setup.model_config.lora) {
    m.adapter = peft_config_text(run_.setup.model_config, run_.config().lora, absolute_path(run_.source.base));
  } else if (run_.setup.saved_state() == SavedState::trained && run_.source.loads_weights()) {
    m.base = absolute_path(run_.source.base);
  }
  if (run_.setup.saved_state() == SavedState::trained) m.base_format = base_name(run_.setup.base_format());
  run_.record.write_to(m);
  const MixSampler::State place = run_.sampler->state();
  m.seed = place.sources.front().seed;
  for (const WindowSampler::State& source : place.sources) m.sampler_windows += source.windows;
  m.sampler_epoch = place.drawn / m.sampler_windows;
  m.sampler_position = place.drawn % m.sampler_windows;
  m.data_digest = run_.data.digest();
  if (place.sources.size() == 1) return m;
  for (std::size_t i = 0; i < place.sources.size(); ++i) {
    const WindowSampler::State& source = place.sources[i];
    m.mix.push_back({run_.sampler->parts()[i].share, source.windows, source.epoch, source.position});
  }
  return m;
}

void CheckpointPolicy::save(bool best) {
  const std::int64_t step = run_.record.step;
  if (!saver_ || (saved_step_ == step && !best)) return;  // a best one's manifest says so
  saved_step_ = saver_->save(manifest(), steps_to_next_save(), best) ? step : -1;
}

void CheckpointPolicy::discard_later_checkpoints() {
  const std::int64_t step = run_.record.step;
  if (directory_) {
    spdlog::warn("checkpoints after step {} in {} belong to a course that this run leaves, and are removed", step,
                 root().string());
    directory_->remove_summary();
  }
  if (saved_step_ != step) {
    save();
    finish(true);
  } else if (directory_) {
    prune_checkpoints(root(), {.written = root() / checkpoint_name(step)});
    sync_directory(root());
  }
}

/// Steps to the next save at most: that a state is the best is known when it is there.
std::int64_t CheckpointPolicy::steps_to_next_save() const {
  const TrainConfig& config = run_.config();
  const std::int64_t step = run_.record.step;
  std::int64_t steps = config.steps - step;
  const auto due_every = [&](std::int64_t every) {
    if (every > 0) steps = std::min(steps, every - step % every);
  };
  due_every(config.checkpoint_every);
  if (config.keep_best) due_every(config.eval_every);
  return steps;
}

void CheckpointPolicy::note_step(double seconds) {
  if (saver_) saver_->note_step(seconds);
}

void CheckpointPolicy::after_step() {
  const TrainConfig& config = run_.config();
  if (saver_ && !poll()) saved_step_ = -1;
  if (config.keep_best) save_if_best();
  if (config.checkpoint_every > 0 && run_.record.step % config.checkpoint_every == 0) save();
}

/// A loss that is not finite is no best: nothing would be below it.
void CheckpointPolicy::save_if_best() {
  RunRecord& record = run_.record;
  if (!record.evaluated() || !record.eval_loss || !std::isfinite(*record.eval_loss)) return;
  if (record.best_loss && *record.eval_loss >= *record.best_loss) return;
  say_(fmt::format("step {}: eval loss {:.4f} is the lowest so far{}; saved as the best", record.step,
                   *record.eval_loss,
                   record.best_loss ? fmt::format(" (before: {:.4f}, step {})", *record.best_loss, record.best_step)
                                    : std::string()));
  record.best_loss = record.eval_loss;
  record.best_step = record.step;
  save(true);
}

void CheckpointPolicy::save_at_the_end() {
  workers_.wait();
  if (saver_ && !finish(false)) saved_step_ = -1;
  save();
  if (saver_) finish(true);
}

/// Looks whether the save under way is done; false where it failed and the run is to go on. With ranks in several
/// processes, the one that writes decides.
bool CheckpointPolicy::poll() {
  Processes& processes = *run_.processes;
  if (!processes.several()) return saver_->poll();
  if (!saver_->under_way() || !processes.of_first("whether a save is done", saver_->is_done())) return true;
  return finish(false);
}

bool CheckpointPolicy::finish(bool last) {
  const bool was_under_way = saver_->under_way();
  const bool saved = saver_->finish(last);
  return was_under_way ? run_.processes->of_first("whether a save is good", saved) : saved;
}

void CheckpointPolicy::save_best_effort() {
  if (run_.record.step == 0) return;
  try {
    save_at_the_end();
  } catch (const Error& error) {
    spdlog::warn("step {} is not saved: {}", run_.record.step, error.what());
  }
}

std::optional<double> CheckpointPolicy::progress() const { return saver_ ? saver_->progress() : std::nullopt; }

}  // namespace tandem
