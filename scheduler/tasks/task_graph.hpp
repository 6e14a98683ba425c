#pragma once
// Pending and ready tasks, and their dependencies on each other. Plain bookkeeping without threads or locks: the
// executor guards it, the simulator drives it in virtual time. It allocates only while more is in flight than ever
// before.
#include <array>
#include <cstdint>
#include <span>
#include <string>

#include "core/base/named_range.hpp"
#include "core/device/device.hpp"
#include "core/params/parameter_layout.hpp"
#include "scheduler/tasks/lane_set.hpp"
#include "scheduler/tasks/ready_queue.hpp"
#include "scheduler/tasks/ring.hpp"
#include "scheduler/tasks/task.hpp"

namespace tandem {

/// Tasks of a lane of the device that are queued and not done: enough that it goes on while the threads that queue are
/// not run, which beside a CPU at work takes milliseconds, and few enough that what turns urgent is not stuck behind a
/// long queue. Nothing is urgent on the way to the host, where a piece of state comes with its weights, a task each.
constexpr int queued_ahead(Lane lane) noexcept { return lane == Lane::device_to_host ? 16 : 8; }
/// Lanes served by a stream of the device, in the order in which ready tasks are queued.
inline constexpr std::array device_lanes{Lane::host_to_device, Lane::device_to_host, Lane::device, Lane::peers};

struct Edge;
/// Number of a dependency among all there ever were.
using EdgeId = Index<Edge, std::int64_t>;
constexpr EdgeId no_edge;

/// One dependency: `second` waits for `first`. In a list of all that wait for `first` to get as far.
struct Edge {
  TaskId first = no_task;
  TaskId second = no_task;
  EdgeId next = no_edge;
  bool counts = false;  ///< among `second`'s `waiting_for`
};

/// A task in flight. A device task is *issued* once queued on its stream with an event recorded behind it, and
/// *done* when the stream has passed it; a CPU task is both at once.
struct TaskNode {
  Task task;
  Event event;       ///< recorded behind the task, while it is issued and not done; the executor's
  NamedRange range;  ///< while its caller is at it; of the executor's
  bool issued = false;
  bool done = false;
  double issued_at = 0.0;        ///< the executor's time of issue, in seconds
  double ready_at = 0.0;         ///< when the last that it depends on was done, as `mark_done` was told
  int waiting_for = 0;           ///< dependencies not yet as far as this task needs them
  int undone = 0;                ///< dependencies that are not done
  EdgeId first_edge = no_edge;   ///< its own dependencies are those from here to where the next task's begin
  EdgeId after_issue = no_edge;  ///< the list of those who become readier when it is issued
  EdgeId after_done = no_edge;   ///< the list of those who are told when it is done
};

/// Graph of the tasks in flight. Between two tasks of device lanes a dependency is met once the first is issued: the
/// second's stream waits for its event. Where one side is the CPU or the disk, it is met when the first is done. A
/// caller's task waits as one of a device lane would, but is never among the ready ones: the caller begins it.
class TaskGraph {
 public:
  /// `first` is the id of the first task to be added; those before it count as done.
  explicit TaskGraph(TaskId first = TaskId(0)) : nodes_(first) {}
  /// Empties the graph, and keeps its memory.
  void restart(TaskId first);

  /// Adds a task whose id is the next one. Dependencies that are gone are met. `now`: ready_at of a task that is ready.
  void add(const Task& task, std::span<const TaskId> dependencies, double now = 0.0);
  /// Once or more often.
  void mark_issued(TaskId id);
  /// Once; issued or not. The task is forgotten once all before it are done.
  void mark_done(TaskId id, double now = 0.0);

  /// The readiest task of a lane, or no_task: of the peers' lane the next one in order, if it is ready. `take` removes
  /// it from the ready ones.
  TaskId ready(Lane lane) const {
    return ready_lanes_.has(lane) ? ready_[static_cast<std::size_t>(lane)].first() : no_task;
  }
  /// Lanes that have such a task.
  LaneSet ready_lanes() const noexcept { return ready_lanes_; }
  void take(Lane lane) {
    ReadyQueue& queue = ready_[static_cast<std::size_t>(lane)];
    queue.pop();
    if (lane == Lane::peers) {
      of_peers_.pop_before(of_peers_.begin() + 1);
      note_next_of_peers();
    } else if (queue.empty()) {
      ready_lanes_.remove(lane);
    }
  }

  bool known(TaskId id) const noexcept { return nodes_.holds(id); }
  /// Node of a known task. Valid until the next `add`.
  TaskNode& node(TaskId id) { return nodes_[id]; }
  const TaskNode& node(TaskId id) const { return nodes_[id]; }
  bool done(TaskId id) const noexcept { return !known(id) || node(id).done; }
  /// Calls `call(const TaskNode&)` for each task that a known one depends on and that is not done.
  template <class Call>
  void for_unfinished(TaskId id, Call call) const;
  bool dependencies_done(TaskId id) const { return node(id).undone == 0; }
  /// Calls `call(const TaskNode&)` for each task that waits for this one, known and issued, and for nothing else.
  template <class Call>
  void for_last_waiting(TaskId id, Call call) const;

  bool empty() const noexcept { return nodes_.empty(); }
  /// The oldest task that may not be done, and the id of the next one to be added.
  TaskId begin() const noexcept { return nodes_.begin(); }
  TaskId end() const noexcept { return nodes_.end(); }
  /// "fetch_weights h.3 waits for update_cpu h.3", a few of them, for the watchdog's message.
  std::string who_waits(const ParameterLayout& layout) const;

 private:
  void release(Edge& edge, TaskNode& waiter);
  void make_ready(const TaskNode& node);
  void note_next_of_peers();
  void tell_done(EdgeId list, double now);
  void forget_done();
  EdgeId end_of_edges(TaskId id) const { return known(id + 1) ? node(id + 1).first_edge : edges_.end(); }

  Ring<TaskNode, TaskId> nodes_;
  Ring<TaskId> of_peers_;     ///< tasks of the peers' lane that are not taken
  Ring<Edge, EdgeId> edges_;  ///< in the order of the tasks that wait
  std::array<ReadyQueue, lane_count> ready_;
  LaneSet ready_lanes_;
};

template <class Call>
void TaskGraph::for_last_waiting(TaskId id, Call call) const {
  for (EdgeId e = node(id).after_done; e != no_edge; e = edges_[e].next) {
    const TaskNode& waiter = node(edges_[e].second);
    if (edges_[e].counts && waiter.waiting_for == 1) call(waiter);
  }
}

template <class Call>
void TaskGraph::for_unfinished(TaskId id, Call call) const {
  if (dependencies_done(id)) return;
  const EdgeId end = end_of_edges(id);
  for (EdgeId e = node(id).first_edge; e < end; ++e) {
    const TaskId first = edges_[e].first;
    if (!done(first)) call(node(first));
  }
}

}  // namespace tandem
