#pragma once
// A run while it trains, from its first step here to its last.
#include <filesystem>
#include <memory>

#include "core/base/named_range.hpp"
#include "core/base/trace.hpp"
#include "scheduler/search/replan.hpp"
#include "train/loop/checkpoint_policy.hpp"
#include "train/loop/prepared_run.hpp"
#include "train/loop/run_output.hpp"
#include "train/loop/step_runner.hpp"
#include "train/loop/step_statistics.hpp"
#include "train/loop/summary.hpp"
#include "train/report/run_directory.hpp"
#include "train/runtime/rank_workers.hpp"

namespace tandem {

class StepLoop {
 public:
  /// Takes all memory of the plan, makes the folder of the run, and makes or loads the state. Blocks. Both must outlive
  /// it. Throws PlanError, DeviceError, InputError, UsageError, WriteError.
  StepLoop(PreparedRun& run, RunOutput& output);

  /// Runs the steps; returns and throws as Trainer::run.
  int run();

 private:
  void begin();
  bool load_weights();
  void initialize();
  OffloadEngine::Codes taken_over(const ParameterValues* values) const;
  bool take_reference();
  bool load_checkpoint();
  void open_ranks_folder();
  void open_files();
  bool saves() const noexcept { return !run_.config().out.empty(); }
  int stopped();
  void train_step();
  void end_step(StepMetrics metrics, const StepResult& result, double begin);
  void watch_nonfinite(const StepReport& report);
  void evaluate();
  bool evaluation_due() const;
  void make_up_evaluation();
  bool out_of_patience() const;
  bool done() const;
  EndReason end_reason(bool interrupted) const;
  void maybe_replan(const EngineCounters& counters);
  void finish(bool interrupted);
  void say_finished();
  void say_why_it_ends(bool interrupted);
  void say_what_next(bool interrupted);

  PreparedRun& run_;
  RunOutput& output_;
  std::unique_ptr<Trace> trace_;  ///< null where none is wanted
  NamedRange step_range_;
  RankWorkers workers_;
  std::filesystem::path resumed_;  ///< folder of the run whose checkpoint this one goes on from; empty: none
  Reference reference_;            ///< reference of DPO, from run() on
  StepRunner runner_;
  StepStatistics statistics_;
  std::unique_ptr<RunDirectory> directory_;  ///< null: nothing of the run is saved, or the first process writes it
  std::unique_ptr<CheckpointPolicy> checkpoints_;
  std::unique_ptr<Replanner> replanner_;  ///< with --policy auto, where the machine is calibrated; else null
  int skipped_in_a_row_ = 0;
  int signal_ = 0;  ///< the signal by which the run ends, the same in all processes; 0: none so far
};

}  // namespace tandem
