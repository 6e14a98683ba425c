// When a run saves, and what it says of itself.
#include <spdlog/spdlog.h>

#include <algorithm>
#include <cmath>

#include "core/base/error.hpp"
#include "core/base/version.hpp"
#include "io/atomic_file.hpp"
#include "models/hf/hf_config.hpp"
#include "train/loop/trainer.hpp"

namespace tandem {

Manifest Trainer::manifest() const {
  Manifest m;
  m.tandem_version = version;
  m.model_name = setup_.model_config.name;
  m.model_config = hf_config_text(setup_.model_config, "float32");
  m.token_kind = data_->bytes() ? "bytes" : "ids";
  m.compute_key = setup_.compute_key();
  m.schedule = schedule_.text();
  m.plan = setup_.plan.outline_json();
  m.step = step_;
  m.skipped_steps = skipped_;
  m.tokens = tokens_;
  m.first_loss = first_loss_;
  m.last_loss = last_loss_;
  m.best_eval_loss = best_loss_;
  m.best_step = best_step_;
  const auto& sampler = sampler_->state();
  m.seed = sampler.seed;
  m.sampler_windows = sampler.windows;
  m.sampler_epoch = sampler.epoch;
  m.sampler_position = sampler.position;
  return m;
}

void Trainer::save(bool best) {
  if (!directory_ || saved_step_ == step_) return;
  saved_step_ = saver_->save(manifest(), steps_to_next_save(), best) ? step_ : -1;
}

/// Of a run that was told to go on from before the last checkpoint here. The state that it begins with is the newest
/// one before configuration and metrics change, so that a kill at any moment leaves files of one course.
void Trainer::discard_later_checkpoints() {
  const std::filesystem::path root = directory_->checkpoints();
  spdlog::warn("checkpoints after step {} in {} belong to a course that this run leaves, and are removed", step_,
               root.string());
  directory_->remove_summary();
  if (saved_step_ == step_) {
    prune_checkpoints(root, {.written = root / checkpoint_name(step_)});
    sync_directory(root);
  } else {
    save();
    saver_->finish(true);
  }
}

/// At most: what is the best is known when it is there.
std::int64_t Trainer::steps_to_next_save() const {
  std::int64_t steps = config_.steps - step_;
  const auto due_every = [&](std::int64_t every) {
    if (every > 0) steps = std::min(steps, every - step_ % every);
  };
  due_every(config_.checkpoint_every);
  if (config_.keep_best) due_every(config_.eval_every);
  return steps;
}

/// After each step: hears of the save under way, and starts one that is due.
void Trainer::look_after_saving() {
  if (saver_ && !saver_->poll()) saved_step_ = -1;
  if (config_.keep_best) save_if_best();
  if (config_.checkpoint_every > 0 && step_ % config_.checkpoint_every == 0) save();
}

/// A loss that is not finite is no best: nothing would be below it.
void Trainer::save_if_best() {
  if (evaluated_step_ != step_ || !eval_loss_ || !std::isfinite(*eval_loss_)) return;
  if (best_loss_ && *eval_loss_ >= *best_loss_) return;
  best_loss_ = eval_loss_;
  best_step_ = step_;
  save(true);
}

void Trainer::save_at_the_end() {
  workers_->wait();
  if (saver_ && !saver_->finish(false)) saved_step_ = -1;
  save();
  if (saver_) saver_->finish(true);
}

/// Of a run that cannot go on: steps that do not count have left no trace in the state.
void Trainer::save_best_effort() {
  if (step_ == 0) return;
  try {
    save_at_the_end();
  } catch (const Error& error) {
    spdlog::warn("step {} is not saved: {}", step_, error.what());
  }
}

}  // namespace tandem
