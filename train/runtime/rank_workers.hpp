#pragma once
// The devices of a run at work: a loaded model on each, which together train one.
#include <condition_variable>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "core/base/trace.hpp"
#include "core/device/group.hpp"
#include "data/token_source.hpp"
#include "offload/engine/state_io.hpp"
#include "train/runtime/loaded_model.hpp"

namespace tandem {

/// Driven by one thread, which is rank 0's; the other ranks have one each, in which their part of everything runs.
class RankWorkers {
 public:
  /// Takes all memory of the plans. Blocks. `setup` and `trace`, which rank 0 writes alone and which may be null, must
  /// outlive it. Throws PlanError, DeviceError.
  RankWorkers(RunSetup& setup, Trace* trace);
  ~RankWorkers();
  RankWorkers(const RankWorkers&) = delete;
  RankWorkers& operator=(const RankWorkers&) = delete;

  int size() const noexcept { return static_cast<int>(members_.size()); }
  LoadedModel& first() noexcept { return *members_.front(); }
  LoadedModel& member(int rank) noexcept { return *members_[static_cast<std::size_t>(rank)]; }
  /// Engines by rank.
  std::vector<OffloadEngine*> engines() const;

  /// Runs `body` for every rank, each on its thread, and blocks until all have come to its end. Where some throw, this
  /// throws what one of them did: what it failed by itself before word of another's failure. Then the group has failed.
  void run(const std::function<void(LoadedModel& member, Rank rank)>& body);
  /// Blocks until every update in flight is done.
  void wait();
  /// 32 hexadecimal digits. `base`: hashes of frozen parameters, by full name, of a state whose checkpoints hold the
  /// trained ones alone. Blocks.
  std::string state_digest(SavedState saved = SavedState::all, const std::map<std::string, std::string>& base = {});
  /// Counters of all ranks together; times are rank 0's.
  EngineCounters counters() const;

  /// Batch of micro-batch `micro` of a step, counted over all devices: number m is that of rank m mod size().
  HostBatch batch(std::int64_t micro);

  /// Evaluates as LoadedModel::evaluate, the windows shared among the ranks; the same bits. `reference`: as
  /// LoadedModel::evaluate_batch has it; with a shape of preferences the loss is the mean over pairs.
  std::optional<EvalResult> evaluate(const TokenSource& source, const std::function<bool()>& stop = {},
                                     std::span<const float> reference = {});
  /// Log-probability of the targets of each window, in order: numbers of fp32, sums of the losses of their tokens in
  /// order. Blocks, and throws as LoadedModel::evaluate. `after` is called after each pass with how many windows there
  /// are by then; where it returns false there is no result.
  std::optional<std::vector<float>> log_probabilities(const TokenSource& source,
                                                      const std::function<bool(std::int64_t)>& after = {});

 private:
  class Worker;

  bool evaluate_all(const TokenSource& source, std::int64_t windows, std::span<const float> reference,
                    const std::function<bool(std::int64_t)>& go_on,
                    const std::function<void(const EvaluatedBatch&)>& use);

  void for_each_rank(const std::function<void(Rank)>& body);
  static void throw_first(const std::vector<std::exception_ptr>& failures);

  std::vector<RunSetup*> setups_;
  std::vector<std::unique_ptr<Group>> group_;  ///< empty where there is one device
  std::vector<std::unique_ptr<LoadedModel>> members_;
  std::vector<std::unique_ptr<Worker>> workers_;  ///< workers of ranks 1 and above
};

}  // namespace tandem
