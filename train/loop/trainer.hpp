#pragma once
// The training loop.
#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/metrics_server.hpp"
#include "core/base/named_range.hpp"
#include "core/base/trace.hpp"
#include "data/token_source.hpp"
#include "data/window_sampler.hpp"
#include "io/checkpoint.hpp"
#include "scheduler/search/replan.hpp"
#include "train/config/config.hpp"
#include "train/hf/model_source.hpp"
#include "train/report/progress.hpp"
#include "train/report/run_directory.hpp"
#include "train/runtime/phase_clock.hpp"
#include "train/runtime/rank_workers.hpp"
#include "train/saving/checkpoint_saver.hpp"
#include "train/setup/run_setup.hpp"

namespace tandem {

/// What does not belong in a configuration file.
struct TrainRequest {
  TrainConfig config;
  bool resume = false;
  std::string resume_from;  ///< a checkpoint; empty: the newest good one in --out
  bool dry_run = false;
  bool quiet = false;
  std::string command;  ///< as typed, for the summary
};

/// A run whose inputs have all been checked and whose memory is planned; nothing is on the disk yet.
class Trainer {
 public:
  /// Checks in this order: configuration, lock of the run, model description, tensors, checkpoint, data, device, plan,
  /// and with `strict` the checkpoint's compute_key. Throws the Error of the first check that fails.
  explicit Trainer(TrainRequest request);
  ~Trainer();

  /// Header and memory table, for people.
  std::string plan_text() const;
  const RunSetup& setup() const noexcept { return setup_; }

  /// Trains, saves, and writes the summary. Blocks. Returns the number of the signal that ended it, or 0.
  /// Throws TrainingError where training cannot go on, WriteError, DeviceError.
  int run();

 private:
  struct StepTimes {
    std::vector<double> step, forward, backward, update, exposed, rate;
  };
  void check_inputs();
  void open_data();
  void find_checkpoint(std::int64_t before = std::numeric_limits<std::int64_t>::max());
  void resolve();
  void take_progress();
  void check_compute_key() const;
  void check_schedule(const Manifest& manifest) const;
  void start();
  void open_files();
  void discard_later_checkpoints();
  void load_weights();
  bool load_checkpoint();
  void train_step();
  std::int64_t fill_batches();
  StepReport run_micro_batches(double lr, std::int64_t targets);
  void run_passes(LoadedModel& member, ParameterAccess& parameters, std::int64_t targets,
                  const std::function<void()>& begin_forward);
  double sum_of_losses() const;
  void account_step(StepMetrics metrics, const StepReport& report, std::int64_t targets, double begin);
  void watch_nonfinite(const StepReport& report);
  void evaluate();
  void save(bool best = false);
  std::int64_t steps_to_next_save() const;
  std::function<std::optional<SaveSlowdown>(const Plan&, double)> predictor() const;
  void look_after_saving();
  void save_if_best();
  void maybe_replan(const EngineCounters& counters);
  void publish(const StepMetrics& metrics);
  void save_at_the_end();
  void save_best_effort();
  void finish(bool interrupted);
  Manifest manifest() const;
  std::string summary(const std::string& digest);
  std::string summary_of_the_steps(const std::string& digest) const;

  TrainRequest request_;
  TrainConfig& config_;
  ModelSource source_;
  std::unique_ptr<TokenSource> data_;
  std::unique_ptr<TokenSource> eval_data_;
  std::unique_ptr<Checkpoint> checkpoint_;
  RunSetup setup_;
  Schedule schedule_;

  std::unique_ptr<RunDirectory> directory_;
  std::unique_ptr<Trace> trace_;
  NamedRange step_range_;
  std::unique_ptr<RankWorkers> workers_;
  std::unique_ptr<PhaseClock> clock_;
  std::unique_ptr<WindowSampler> sampler_;
  std::unique_ptr<Progress> progress_;
  std::unique_ptr<CheckpointSaver> saver_;
  std::unique_ptr<MetricsServer> metrics_server_;
  std::unique_ptr<Replanner> replanner_;  ///< with --policy auto, where the machine is calibrated

  std::int64_t windows_ = 0;
  std::int64_t step_ = 0;  ///< steps taken, skipped ones included
  std::int64_t saved_step_ = -1;
  std::int64_t tokens_ = 0;
  std::int64_t skipped_ = 0;
  int skipped_in_a_row_ = 0;
  std::optional<std::int64_t> resumed_from_;
  std::optional<double> first_loss_;
  std::optional<double> last_loss_;
  std::optional<double> eval_loss_;
  std::optional<double> best_loss_;
  std::int64_t best_step_ = 0;
  std::int64_t evaluated_step_ = -1;
  StepTimes times_;
  EngineCounters counters_seen_;  ///< at the end of the last step
};

}  // namespace tandem
