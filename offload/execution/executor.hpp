#pragma once
// Runs tasks: binds device lanes to streams, the CPU's and the file's to workers, starts each as soon as what it
// depends on allows, and carries every failure to whoever waits.
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <span>
#include <string_view>
#include <thread>
#include <vector>

#include "core/base/brief_mutex.hpp"
#include "core/base/stall.hpp"
#include "core/base/trace.hpp"
#include "core/device/device.hpp"
#include "core/device/group.hpp"
#include "core/params/parameter_layout.hpp"
#include "offload/execution/lane_load.hpp"
#include "offload/execution/lane_streams.hpp"
#include "offload/execution/task_accounts.hpp"
#include "offload/execution/task_runner.hpp"
#include "offload/execution/update_clock.hpp"
#include "scheduler/tasks/lane_set.hpp"
#include "scheduler/tasks/task.hpp"
#include "scheduler/tasks/task_graph.hpp"

namespace tandem {

/// Behaviour of copies to and from the engine's host memory: `block` where some of it is pageable, and the caller waits
/// within the call.
enum class Copies : std::uint8_t { async, block };

/// Parts that an executor works with. All of them must outlive the executor.
struct ExecutorParts {
  Device& device;
  const ParameterLayout& layout;
  TaskRunner& runner;
  UpdateClock& updates;             ///< is told of updates as they are taken over, and as they are done
  Trace* trace = nullptr;           ///< may be null
  double watchdog_seconds = 300.0;  ///< without any progress, after which a wait fails
  bool overlap = true;              ///< without it at most one task runs at a time, the caller's included
  Copies copies = Copies::async;
  std::span<const Lane> worker_lanes;  ///< lanes without a stream that will have tasks; read by the constructor alone
  Group* group = nullptr;  ///< is told of failures, and its calls have a thread of their own; null where there are no
                           ///< other ranks
};

/// Threads of its own: one queues work on the device's streams, or one for each lane where that blocks, so that copies
/// in one direction hold up no others; one does so for what ranks exchange, where each waits for the others; and one
/// for each lane of workers runs its tasks. Methods are called by one thread, the engine's; those about save tasks by
/// one thread at a time, whichever. After a failure nothing more is started and every wait rethrows it.
class Executor {
 public:
  explicit Executor(const ExecutorParts& parts);
  /// Waits for what is queued, starts nothing more. Where nothing moves for the watchdog's time, that is told as a
  /// stall (`report_stall`), and the wait goes on. Never throws.
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  /// Takes over the tasks and clears the list. Does not block.
  void submit(TaskList& tasks);
  /// Blocks until all is queued that the caller's task `id` depends on, then makes `stream` wait for it. Returns
  /// the seconds blocked.
  double begin_caller_task(TaskId id, StreamView stream, std::string_view what);
  /// The caller's task `id` ends with what is queued on `stream` now. Does not block.
  void finish_caller_task(TaskId id, StreamView stream);
  /// Blocks until the save task `id` is the next of its lane and all that it depends on is done.
  void begin_save_task(TaskId id);
  /// Notes progress of the save task: bytes have moved, which is progress for whoever waits for it. Does not block.
  void note_save_progress();
  /// Ends the save task `id`. Does not block.
  void finish_save_task(TaskId id);
  /// Save tasks before `end` that have not begun are done as soon as what they depend on is. Does not block.
  void drop_save_tasks(TaskId end) noexcept;
  /// How long updates have waited for save tasks and for nothing else, seconds so far.
  double save_wait_seconds();
  /// Throws again what some task threw, if one did. Does not block.
  void require_good();
  /// Blocks until every task is done, the caller's included. Returns the seconds blocked.
  double drain(std::string_view what);
  /// Blocks until these are done. Returns the seconds blocked.
  double wait_done(std::span<const TaskId> tasks, std::string_view what);
  /// The oldest task that may still be running.
  TaskId oldest();
  /// Totals so far.
  LaneSeconds busy();
  /// Fails the executor, as a failure of its own would: for the engine's work around the caller's tasks.
  void give_up(std::exception_ptr error);

 private:
  /// A thread of ours that sleeps while there is nothing for it to do. No other one serves its lanes.
  struct Worker {
    LaneSet lanes;
    std::thread thread;
    std::condition_variable_any wakes;
  };

  /// Somebody else's thread that waits for `wanted`, which is empty while it does not.
  struct Waiter {
    std::condition_variable_any wakes;  ///< notified when `wanted` has come, or something failed
    std::function<bool()> wanted;
  };

  template <class Predicate>
  void sleep_until(std::unique_lock<BriefMutex>& lock, Worker& worker, Predicate ready);
  void wake();
  void wake_workers();
  void wake(Waiter& waiter);
  void wake_all();
  void pass_dropped_saves();
  void end_threads();
  void await_calls();
  void issue_loop(Worker& issuer);
  void work_loop(Worker& worker);
  /// Lanes with a task that may be started.
  LaneSet startable() const { return graph_.ready_lanes().without(load_.full()); }
  TaskId next_task(const Worker& worker) const;
  bool may_start() const { return overlap_ || load_.none(); }
  bool idle() const { return load_.none() && (graph_.ready_lanes() & served_).empty(); }
  void issue(std::unique_lock<BriefMutex>& lock, TaskId id);
  void complete(TaskId id, const std::exception_ptr& error);
  void finish(TaskId id, const std::exception_ptr& error);
  void fail(std::exception_ptr error);
  template <class Predicate>
  double wait(std::unique_lock<BriefMutex>& lock, Waiter& waiter, std::string_view what, LayerIndex layer,
              Predicate done);
  void watch(ProgressWatch& progress, std::string_view what, LayerIndex layer);
  Event new_event();

  Device& device_;
  const ParameterLayout& layout_;
  TaskRunner& runner_;
  double watchdog_seconds_;
  bool overlap_;
  UpdateClock& updates_;

  BriefMutex mutex_;
  Waiter caller_;
  Waiter saver_;
  TaskGraph graph_;
  TaskAccounts accounts_;
  std::vector<Event> spare_events_;
  LaneLoad load_;
  LaneSet asleep_;  ///< lanes of workers that sleep
  LaneSet served_;  ///< lanes of the device, and of workers
  TaskId dropped_saves_end_{0};
  int callbacks_ = 0;             ///< asked of the device and not yet made
  bool among_ranks_ = false;      ///< a thread waits for other ranks
  std::uint64_t steps_made_ = 0;  ///< any progress counts
  std::exception_ptr failure_;
  std::atomic<bool> failed_{false};  ///< set with it, to be asked without the lock
  bool stopping_ = false;

  Group* group_;
  LaneStreams streams_;
  std::vector<Worker> issuers_;  ///< queue the tasks of lanes of the device
  std::vector<Worker> workers_;  ///< run the tasks of a lane of no stream
};

}  // namespace tandem
