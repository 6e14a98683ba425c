#pragma once
// A run before it trains: inputs checked, memory planned.
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "data/mix_sampler.hpp"
#include "data/token_source.hpp"
#include "io/checkpoint.hpp"
#include "train/config/schedule.hpp"
#include "train/hf/base_hashes.hpp"
#include "train/hf/model_source.hpp"
#include "train/loop/run_record.hpp"
#include "train/loop/train_request.hpp"
#include "train/report/rank_log.hpp"
#include "train/setup/processes.hpp"
#include "train/setup/run_setup.hpp"
#include "train/setup/training_data.hpp"

namespace tandem {

/// All parts of a run, prepared but not in memory. Nothing is on the disk yet.
class PreparedRun {
 public:
  /// Checks in this order: configuration, the other processes and theirs, lock of the run, model description, tensors,
  /// checkpoint, data, device, plan, room for checkpoints, and with `strict` the checkpoint's compute_key. Throws the
  /// Error of the first check that fails.
  explicit PreparedRun(TrainRequest request);

  /// The configuration, with everything that was left open decided.
  const TrainConfig& config() const noexcept { return request.config; }
  /// Rows of the data that are drawn together: those of a pair, or one.
  std::int64_t rows_at_once() const noexcept { return config().objective == Objective::dpo ? 2 : 1; }
  /// The flag by which the length of the run was given: --steps or --epochs.
  std::string_view length_flag() const noexcept { return epochs_ > 0.0 ? "--epochs" : "--steps"; }
  /// Header and memory table, for people.
  std::string plan_text() const;
  /// Takes another checkpoint, of an earlier step, in place of one that turned out to be damaged; or none. Throws
  /// InputError.
  void pass_over_checkpoint();

  TrainRequest request;
  std::unique_ptr<Processes> processes;  ///< never null
  std::unique_ptr<RankLog> log;          ///< null where this process is alone
  ModelSource source;
  TrainingData data;
  std::unique_ptr<TokenSource> eval_data;  ///< null where there is none
  /// Checkpoint that the run goes on from, until it is loaded; null: from the beginning.
  std::unique_ptr<Checkpoint> checkpoint;
  RunSetup setup;
  Schedule schedule;
  std::optional<MixSampler> sampler;  ///< never empty
  RunRecord record;
  BaseHashes base_hashes;  ///< hashes of frozen parameters that checkpoints leave out, once they are loaded

 private:
  void join();
  void prepare();
  void check_request() const;
  std::unique_ptr<Checkpoint> choose_checkpoint(std::int64_t before = std::numeric_limits<std::int64_t>::max());
  void open_model();
  void take_reference_of_checkpoint();
  void open_data();
  void resolve();
  void take_progress();
  void take_place(const Manifest& manifest);
  void check_schedule(const Manifest& manifest) const;
  void check_compute_key() const;

  std::vector<MixPart> parts_;  ///< sources of the data
  double epochs_ = 0.0;         ///< length of the run as it was asked for; 0: in steps
};

}  // namespace tandem
