#pragma once
// Policy of checkpoints: when a run saves, what it keeps, and what its manifests say.
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "io/manifest.hpp"
#include "train/loop/prepared_run.hpp"
#include "train/report/run_directory.hpp"
#include "train/runtime/rank_workers.hpp"
#include "train/saving/checkpoint_saver.hpp"

namespace tandem {

class CheckpointPolicy {
 public:
  /// All arguments must outlive the object. `directory`: folder of the run; null: nothing is saved, or another process
  /// writes it. `saved`: whether the state that the run begins with is a checkpoint in that directory. `say` is told of
  /// every checkpoint that is done, and of every new best one.
  CheckpointPolicy(PreparedRun& run, RankWorkers& workers, RunDirectory* directory, bool saved,
                   std::function<void(const std::string&)> say);

  /// Removes checkpoints after the one that the run was told to go on from. The state that the run begins with is then
  /// the newest one before configuration and metrics change, so that a kill at any moment leaves files of one course.
  void discard_later_checkpoints();
  /// Notes the seconds of a step that has ended.
  void note_step(double seconds);
  /// Work after each step: takes in the result of the save under way, and starts one that is due. Throws as
  /// CheckpointSaver::poll.
  void after_step();
  /// Saves the state that is there, unless it is saved. Blocks. Throws WriteError.
  void save_at_the_end();
  /// Saves the state of a run that cannot go on, as save_at_the_end() does: steps that do not count have left no trace
  /// in it. A failure is a warning.
  void save_best_effort();
  /// Share of the save under way that is written; empty where there is none.
  std::optional<double> progress() const;

 private:
  Manifest manifest() const;
  std::function<std::optional<SaveSlowdown>(const Plan&, double)> predictor() const;
  std::int64_t steps_to_next_save() const;
  void save(bool best = false);
  void save_if_best();
  bool poll();
  bool finish(bool last);
  std::filesystem::path root() const;

  PreparedRun& run_;
  RankWorkers& workers_;
  RunDirectory* directory_;
  std::function<void(const std::string&)> say_;
  std::unique_ptr<CheckpointSaver> saver_;  ///< null where nothing is saved
  std::int64_t saved_step_;                 ///< step whose state is saved, or is being saved; -1: none
};

}  // namespace tandem
