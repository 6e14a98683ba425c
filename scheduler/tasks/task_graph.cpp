#include "scheduler/tasks/task_graph.hpp"

#include <fmt/format.h>

#include <utility>

#include "core/base/error.hpp"

namespace tandem {
namespace {

/// The caller's tasks end where a stream does.
bool ends_on_stream(Lane lane) noexcept { return is_of_device(lane) || lane == Lane::caller; }

bool needs_done(const Task& first, const Task& second) noexcept {
  return !ends_on_stream(first.lane) || !ends_on_stream(second.lane);
}

}  // namespace

void TaskGraph::restart(TaskId first) {
  nodes_.restart(first);
  of_peers_.restart();
  edges_.restart();
  for (ReadyQueue& ready : ready_) ready.clear();
}

void TaskGraph::add(const Task& task, std::span<const TaskId> dependencies, double now) {
  if (task.id != end()) throw MisuseError("tasks must be added in the order of their ids");
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
  for (const TaskId d : dependencies) {
    if (done(d)) continue;
    TaskNode& first = node(d);
    const bool waits_for_end = needs_done(first.task, task);
    EdgeId& list = first.issued || waits_for_end ? first.after_done : first.after_issue;
    const bool counts = !first.issued || waits_for_end;
    edges_.push({d, task.id, std::exchange(list, edges_.end()), counts});
    ++added.undone;
    if (counts) ++added.waiting_for;
  }
  if (task.lane == Lane::peers) of_peers_.push(task.id);
  if (added.waiting_for == 0) make_ready(added);
}

void TaskGraph::make_ready(const TaskNode& node) {
  if (node.task.lane == Lane::caller) return;
  // Exchanges between ranks have one order on all of them, whatever is ready where.
  const int priority = node.task.lane == Lane::peers ? 0 : node.task.priority;
  ready_[static_cast<std::size_t>(node.task.lane)].push(priority, node.task.id);
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
  for (const EdgeId list : {n.after_issue, n.after_done}) {
    for (EdgeId e = list; e != no_edge; e = edges_[e].next) {
      TaskNode& waiter = node(edges_[e].second);
      waiter.ready_at = now;
      --waiter.undone;
      release(edges_[e], waiter);
    }
  }
  if (id != begin()) return;
  TaskId oldest = id;
  while (known(oldest) && node(oldest).done) ++oldest;
  edges_.pop_before(known(oldest) ? node(oldest).first_edge : edges_.end());
  nodes_.pop_before(oldest);
}

void TaskGraph::take(Lane lane) {
  ready_[static_cast<std::size_t>(lane)].pop();
  if (lane == Lane::peers) of_peers_.pop_before(of_peers_.begin() + 1);
}

std::string TaskGraph::who_waits(const ParameterLayout& layout) const {
  constexpr int shown = 4;
  std::string text;
  int count = 0;
  const auto name = [&](const Task& t) { return t.text(t.layer >= 0 ? layout.layer(t.layer).name : "-"); };
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
