#pragma once
// Which tasks are pending, which are ready, and who waits for whom. Plain bookkeeping without threads or
// locks: the executor guards it, the simulator drives it in virtual time.
#include <array>
#include <cstdint>
#include <deque>
#include <queue>
#include <string>
#include <vector>

#include "core/device.hpp"
#include "core/parameter_layout.hpp"
#include "scheduler/task.hpp"

namespace tandem {

/// Work queued ahead on each stream: enough that the stream never idles between two tasks, few enough that
/// what turns urgent is not stuck behind a long queue.
constexpr int queued_ahead = 3;
/// Lanes served by a stream of the device, in the order in which ready tasks are queued.
inline constexpr std::array device_lanes{Lane::host_to_device, Lane::device_to_host, Lane::device};

/// A task in flight. A device task is *issued* once queued on its stream with `event` recorded behind
/// it, and *done* when the stream has passed it; a CPU task is both at once.
struct TaskNode {
  Task task;
  Event event;
  bool issued = false;
  bool done = false;
  double issued_at = 0.0;
  int waiting_for = 0;              ///< dependencies not yet as far as this task needs them
  std::vector<TaskId> after_issue;  ///< who becomes readier when it is issued
  std::vector<TaskId> after_done;   ///< ... and when it is done
};

/// Between two tasks of device lanes a dependency is met once the first is issued: the second's stream
/// waits for its event. Where one side is the CPU, it is met when the first is done.
class TaskGraph {
 public:
  /// `first` is the id of the first task to be added; those before it count as done.
  explicit TaskGraph(TaskId first = 0) : base_(first) {}

  /// Adds a task whose id is the next one. `event` is recorded behind it. Dependencies that are gone are met.
  void add(Task task, Event event);
  void mark_issued(TaskId id, double now);
  void mark_done(TaskId id);

  /// The readiest task of a lane, or no_task. `take` removes it from the ready ones.
  TaskId ready(Lane lane) const;
  void take(Lane lane);

  bool known(TaskId id) const noexcept { return id >= base_ && id < end(); }
  TaskNode& node(TaskId id) { return nodes_.at(static_cast<std::size_t>(id - base_)); }
  const TaskNode& node(TaskId id) const { return nodes_.at(static_cast<std::size_t>(id - base_)); }
  /// Removes done tasks from the front and hands back their events.
  void retire(std::vector<Event>& events);

  bool empty() const noexcept { return nodes_.empty(); }
  TaskId base() const noexcept { return base_; }
  TaskId end() const noexcept { return base_ + static_cast<TaskId>(nodes_.size()); }
  /// "fetch_weights h.3 waits for update_cpu h.3", a few of them, for the watchdog's message.
  std::string who_waits(const ParameterLayout& layout) const;

 private:
  using Entry = std::pair<int, TaskId>;  // priority, id: the smaller first
  using Ready = std::priority_queue<Entry, std::vector<Entry>, std::greater<>>;

  void release(const std::vector<TaskId>& waiters);
  void make_ready(const TaskNode& node);
  static bool needs_done(const Task& first, const Task& second) noexcept;

  std::deque<TaskNode> nodes_;
  TaskId base_;
  std::array<Ready, lane_count> ready_;
};

}  // namespace tandem
