#pragma once
// The ranks of a run at work: a loaded model on each one's device, which together train one. All of them are in this
// process, or one is, and the others in processes that make the same calls.
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

/// Counters and peaks of the ranks of a run.
struct RankTotals {
  EngineCounters counters;
  InputTraffic inputs;
  std::size_t peak_device_bytes = 0;
  std::size_t peak_host_bytes = 0;  ///< sum over processes, without the memory of devices that are made of the host
};

/// Driven by one thread, which is that of the first rank here; the others here have one each, in which their part of
/// everything runs. Where there are several processes, each makes the same calls in the same order.
class RankWorkers {
 public:
  /// Takes all memory of the plans. Blocks. `setup` and `trace`, of the first rank here, which may be null, must
  /// outlive it. Throws PlanError, DeviceError.
  RankWorkers(RunSetup& setup, Trace* trace);
  ~RankWorkers();
  RankWorkers(const RankWorkers&) = delete;
  RankWorkers& operator=(const RankWorkers&) = delete;

  /// Ranks of the run, wherever they are.
  int size() const noexcept { return count_; }
  /// The first of those here, and its number.
  LoadedModel& first() noexcept { return *members_.front(); }
  int first_rank() const noexcept { return first_rank_; }
  bool is_here(int rank) const noexcept { return rank >= first_rank_ && rank < first_rank_ + here(); }
  LoadedModel& member(int rank) noexcept { return *members_[static_cast<std::size_t>(rank - first_rank_)]; }
  /// Engines of the ranks here, by rank.
  std::vector<OffloadEngine*> engines() const;
  /// Processes of the run.
  Processes& processes() noexcept { return processes_; }

  /// Runs `body` for every rank here, each on its thread, and blocks until all have come to its end. Where some throw,
  /// this throws what one of them did: what it failed by itself before word of another's failure. Then the group has
  /// failed.
  void run(const std::function<void(LoadedModel& member, Rank rank)>& body);
  /// Blocks until every update in flight is done.
  void wait();
  /// 32 hexadecimal digits. `base`: hashes of frozen parameters, by full name, of a state whose checkpoints hold the
  /// trained ones alone. Blocks.
  std::string state_digest(SavedState saved = SavedState::all, const std::map<std::string, std::string>& base = {});
  /// Figures of all ranks together; times are the first rank's here, peaks of devices the highest.
  RankTotals totals();

  /// Batch of micro-batch `micro` of a step, counted over all ranks: number m is that of rank m mod size(). Of a rank
  /// that is elsewhere, a place whose contents are the next such one's.
  HostBatch batch(std::int64_t micro);
  /// Hands results of the step's `micro_batches` to `use` in their order: losses, and figures of pairs where there are
  /// some. Blocks until all ranks have theirs.
  void visit_results(std::int64_t micro_batches,
                     const std::function<void(std::span<const float> losses, std::span<const float> pairs)>& use);

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

  int here() const noexcept { return static_cast<int>(members_.size()); }
  RankTotals own_totals();
  std::vector<EvaluatedBatch> batches_of_all(const std::vector<EvaluatedBatch>& own,
                                             std::vector<std::vector<float>>& room);

  bool evaluate_all(const TokenSource& source, std::int64_t windows, std::span<const float> reference,
                    const std::function<bool(std::int64_t)>& go_on,
                    const std::function<void(const EvaluatedBatch&)>& use);

  void for_each_rank(const std::function<void(Rank)>& body);
  static void throw_first(const std::vector<std::exception_ptr>& failures);

  Processes alone_;  ///< used where the setup has no processes
  Processes& processes_;
  const int count_;
  const int first_rank_;
  std::vector<RunSetup*> setups_;              ///< setups of the ranks here, as what follows
  std::vector<std::unique_ptr<Group>> group_;  ///< empty where there is one rank
  std::vector<std::unique_ptr<LoadedModel>> members_;
  std::vector<std::unique_ptr<Worker>> workers_;  ///< workers of all but the first
};

}  // namespace tandem
