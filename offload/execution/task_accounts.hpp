#pragma once
// How long tasks ran: totals of each lane, and spans for a trace and a profiler.
#include <algorithm>
#include <array>
#include <cstddef>

#include "core/base/named_range.hpp"
#include "core/base/trace.hpp"
#include "core/params/parameter_layout.hpp"
#include "offload/execution/engine_counters.hpp"
#include "scheduler/tasks/task.hpp"
#include "scheduler/tasks/task_graph.hpp"

namespace tandem {

/// Used under the executor's lock, but for `range_of`. Times are those of trace_now().
class TaskAccounts {
 public:
  /// All arguments must outlive the object; `trace` and `ranges` may be null.
  TaskAccounts(const TaskGraph& graph, const ParameterLayout& layout, Trace* trace, RangeSink* ranges)
      : graph_(graph), layout_(layout), trace_(trace), ranges_(ranges) {}

  /// A task is done. It ran from when it was queued, its dependencies were done and the one before it in its lane had
  /// ended: the lane's end of it is all that is seen. Where word of a dependency's end is still on its way, on another
  /// thread, that was only just.
  void note_done(const TaskNode& node, double now) {
    const auto lane = static_cast<std::size_t>(node.task.lane);
    const bool known = node.undone == 0;
    const double begin = known ? std::max(std::max(node.issued_at, node.ready_at), busy_until_[lane]) : now;
    busy_until_[lane] = now;
    busy_[lane] += now - begin;
    if (updates_on_cpu(node.task.kind)) cpu_update_busy_ += now - begin;
    if (trace_ != nullptr) add_span(node.task, begin, now);
  }
  /// A save task ends; which updates waited for it and for nothing else is counted.
  void note_save_done(TaskId save, double now);
  /// The span of a task as it happens. Of a task of a device lane it covers the calls that queue it.
  NamedRange range_of(const Task& task) const { return ranges_ == nullptr ? NamedRange() : told_range_of(task); }

  /// Totals so far.
  LaneSeconds busy() const;
  /// How long updates have waited for save tasks and for nothing else.
  double save_wait_seconds() const noexcept { return save_waits_; }

 private:
  static bool updates_on_cpu(TaskKind kind) noexcept {
    return kind == TaskKind::update_cpu || kind == TaskKind::speculate;
  }
  void add_span(const Task& task, double begin, double end) const;
  NamedRange told_range_of(const Task& task) const;

  const TaskGraph& graph_;
  const ParameterLayout& layout_;
  Trace* trace_;
  RangeSink* ranges_;
  std::array<double, lane_count> busy_until_{};
  std::array<double, lane_count> busy_{};  ///< seconds
  double cpu_update_busy_ = 0.0;
  double save_waits_ = 0.0;
  double save_waits_until_ = 0.0;  ///< counted so far
};

}  // namespace tandem
