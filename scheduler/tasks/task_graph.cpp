#include "scheduler/tasks/task_graph.hpp"

#include <fmt/format.h>

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
  for (Ready& ready : ready_) ready.clear();
}

void TaskGraph::add(const Task& task, std::span<const TaskId> dependencies) {
  if (task.id != end()) throw MisuseError("tasks must be added in the order of their ids");
  TaskNode added;
  added.task = task;
  added.first_edge = edges_.end();
  for (const TaskId d : dependencies) {
    if (done(d)) continue;
    TaskNode& first = node(d);
    const bool by_done = first.issued || needs_done(first.task, task);
    Edge edge{d, task.id};
    edge.counts = !first.issued || needs_done(first.task, task);
    edge.next = std::exchange(by_done ? first.after_done : first.after_issue, edges_.end());
    if (edge.counts) ++added.waiting_for;
    edges_.push(edge);
  }
  if (task.lane == Lane::peers) of_peers_.push(task.id);
  const TaskNode& node = nodes_.push(std::move(added));
  if (node.waiting_for == 0) make_ready(node);
}

void TaskGraph::make_ready(const TaskNode& node) {
  if (node.task.lane == Lane::caller) return;
  // Exchanges between ranks have one order on all of them, whatever is ready where.
  const int priority = node.task.lane == Lane::peers ? 0 : node.task.priority;
  ready_[static_cast<std::size_t>(node.task.lane)].emplace(priority, node.task.id);
}

/// Releases an edge: the task at its end waits for one task less.
void TaskGraph::release(Edge& edge) {
  if (!std::exchange(edge.counts, false)) return;
  TaskNode& waiter = node(edge.second);
  if (--waiter.waiting_for == 0) make_ready(waiter);
}

void TaskGraph::mark_issued(TaskId id) {
  TaskNode& n = node(id);
  n.issued = true;
  // Released, they are still told when it is done.
  for (EdgeId e = std::exchange(n.after_issue, no_edge); e != no_edge;) {
    Edge& edge = edges_[e];
    release(edge);
    const EdgeId next = edge.next;
    edge.next = std::exchange(n.after_done, e);
    e = next;
  }
}

void TaskGraph::mark_done(TaskId id, double now) {
  mark_issued(id);
  TaskNode& n = node(id);
  n.done = true;
  for (EdgeId e = n.after_done; e != no_edge; e = edges_[e].next) {
    node(edges_[e].second).ready_at = now;
    release(edges_[e]);
  }
  TaskId oldest = begin();
  while (known(oldest) && node(oldest).done) ++oldest;
  edges_.pop_before(known(oldest) ? node(oldest).first_edge : edges_.end());
  nodes_.pop_before(oldest);
}

TaskId TaskGraph::ready(Lane lane) const {
  const Ready& queue = ready_[static_cast<std::size_t>(lane)];
  const TaskId id = queue.empty() ? no_task : queue.top().second;
  return lane == Lane::peers && id != no_task && id != of_peers_[of_peers_.begin()] ? no_task : id;
}

void TaskGraph::take(Lane lane) {
  ready_[static_cast<std::size_t>(lane)].pop();
  if (lane == Lane::peers) of_peers_.pop_before(of_peers_.begin() + 1);
}

bool TaskGraph::dependencies_done(TaskId id) const {
  const EdgeId end = end_of_edges(id);
  for (EdgeId e = node(id).first_edge; e < end; ++e) {
    if (!done(edges_[e].first)) return false;
  }
  return true;
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
