#include "scheduler/tasks/task_graph.hpp"

#include <fmt/format.h>

#include <utility>

#include "core/base/error.hpp"

namespace tandem {
namespace {

/// Lanes whose tasks end where a stream does: those of the device, and the caller's.
constexpr LaneSet on_streams = LaneSet(device_lanes) | LaneSet(Lane::caller);

[[noreturn, gnu::cold]] void refuse_order() { throw MisuseError("tasks must be added in the order of their ids"); }

}  // namespace

void TaskGraph::restart(TaskId first) {
  nodes_.restart(first);
  of_peers_.restart();
  edges_.restart();
  for (ReadyQueue& ready : ready_) ready.clear();
  ready_lanes_ = {};
}

void TaskGraph::add(const Task& task, std::span<const TaskId> dependencies, double now) {
  if (task.id != end()) refuse_order();
  TaskNode& added = nodes_.push();
  added.task = task;
  added.event = {};
  added.range.end();
  added.issued = added.done = false;
  added.issued_at = 0.0;
  added.ready_at = now;
  added.waiting_for = added.undone = 0;
  added.after_issue = added.after_done = no_edge;
  added.first_edge = edges_.end();
  const bool on_stream = on_streams.has(task.lane);
  for (const TaskId d : dependencies) {
    if (!known(d)) continue;
    TaskNode& first = node(d);
    if (first.done) continue;
    const bool waits_for_end = !on_stream || !on_streams.has(first.task.lane);
    EdgeId& list = first.issued || waits_for_end ? first.after_done : first.after_issue;
    const bool counts = !first.issued || waits_for_end;
    const EdgeId next = std::exchange(list, edges_.end());
    edges_.push() = {d, task.id, next, counts};
    ++added.undone;
    added.waiting_for += counts ? 1 : 0;
  }
  if (task.lane == Lane::peers) of_peers_.push(task.id);
  if (added.waiting_for == 0) make_ready(added);
}

void TaskGraph::make_ready(const TaskNode& node) {
  const Lane lane = node.task.lane;
  if (lane == Lane::caller) return;
  ReadyQueue& queue = ready_[static_cast<std::size_t>(lane)];
  if (lane != Lane::peers) {
    queue.push(node.task.priority, node.task.id);
    ready_lanes_.add(lane);
  } else {
    queue.push(0, node.task.id);
    note_next_of_peers();
  }
}

/// Notes whether the next task of the peers' lane is ready: exchanges between ranks have one order on all of them,
/// whatever is ready where.
void TaskGraph::note_next_of_peers() {
  const ReadyQueue& queue = ready_[static_cast<std::size_t>(Lane::peers)];
  const bool next = !queue.empty() && queue.first() == of_peers_[of_peers_.begin()];
  next ? ready_lanes_.add(Lane::peers) : ready_lanes_.remove(Lane::peers);
}

/// Releases an edge: the task at its end waits for one task less.
inline void TaskGraph::release(Edge& edge, TaskNode& waiter) {
  if (std::exchange(edge.counts, false) && --waiter.waiting_for == 0) make_ready(waiter);
}

void TaskGraph::mark_issued(TaskId id) {
  TaskNode& n = node(id);
  n.issued = true;
  // Released, they are still told when it is done.
  for (EdgeId e = std::exchange(n.after_issue, no_edge); e != no_edge;) {
    Edge& edge = edges_[e];
    release(edge, node(edge.second));
    const EdgeId next = edge.next;
    edge.next = std::exchange(n.after_done, e);
    e = next;
  }
}

void TaskGraph::mark_done(TaskId id, double now) {
  TaskNode& n = node(id);
  n.issued = n.done = true;
  tell_done(n.after_issue, now);
  tell_done(n.after_done, now);
  if (id == begin()) forget_done();
}

/// Tells those who wait, by a list of edges, that a task is done.
inline void TaskGraph::tell_done(EdgeId list, double now) {
  while (list != no_edge) {
    Edge& edge = edges_[list];
    TaskNode& waiter = node(edge.second);
    waiter.ready_at = now;
    --waiter.undone;
    release(edge, waiter);
    list = edge.next;
  }
}

/// Forgets the oldest tasks, which are done, up to the first that is not.
inline void TaskGraph::forget_done() {
  TaskId oldest = begin() + 1;
  while (known(oldest) && node(oldest).done) ++oldest;
  edges_.pop_before(known(oldest) ? node(oldest).first_edge : edges_.end());
  nodes_.pop_before(oldest);
}

std::string TaskGraph::who_waits(const ParameterLayout& layout) const {
  constexpr int shown = 4;
  std::string text;
  int count = 0;
  const auto name = [&](const Task& t) { return t.text(t.layer.none() ? "-" : layer_at(layout, t.layer).name); };
  for (TaskId id = begin(); id < end() && count < shown; ++id) {
    const TaskNode& n = node(id);
    if (n.done) continue;
    ++count;
    if (!text.empty()) text += "; ";
    text += fmt::format("{} ({})", name(n.task), n.issued ? "queued, not finished" : name_of(n.task.lane));
    if (n.issued) continue;
    const Task* first = nullptr;
    for_unfinished(id, [&](const TaskNode& f) { first = first == nullptr ? &f.task : first; });
    if (first != nullptr) text += " waits for " + name(*first);
  }
  return text.empty() ? "nothing is pending" : text;
}

}  // namespace tandem
