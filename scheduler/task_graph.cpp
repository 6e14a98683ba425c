#include "scheduler/task_graph.hpp"

#include <fmt/format.h>

#include "core/error.hpp"

namespace tandem {

bool TaskGraph::needs_done(const Task& first, const Task& second) noexcept {
  return first.lane == Lane::cpu || second.lane == Lane::cpu;
}

void TaskGraph::add(Task task, Event event) {
  if (task.id != end()) throw MisuseError("tasks must be added in the order of their ids");
  TaskNode added;
  added.event = std::move(event);
  // The caller waits for its own tasks' dependencies itself.
  if (task.lane != Lane::caller) {
    for (const TaskId d : task.dependencies) {
      if (!known(d)) continue;
      TaskNode& first = node(d);
      const bool by_done = needs_done(first.task, task);
      if (by_done ? first.done : first.issued) continue;
      (by_done ? first.after_done : first.after_issue).push_back(task.id);
      ++added.waiting_for;
    }
  }
  added.task = std::move(task);
  nodes_.push_back(std::move(added));
  if (nodes_.back().waiting_for == 0) make_ready(nodes_.back());
}

void TaskGraph::make_ready(const TaskNode& node) {
  if (node.task.lane == Lane::caller) return;
  ready_[static_cast<std::size_t>(node.task.lane)].emplace(node.task.priority, node.task.id);
}

void TaskGraph::release(const std::vector<TaskId>& waiters) {
  for (const TaskId w : waiters) {
    TaskNode& waiter = node(w);
    if (--waiter.waiting_for == 0) make_ready(waiter);
  }
}

void TaskGraph::mark_issued(TaskId id, double now) {
  TaskNode& n = node(id);
  n.issued = true;
  n.issued_at = now;
  release(n.after_issue);
  n.after_issue.clear();
}

void TaskGraph::mark_done(TaskId id) {
  TaskNode& n = node(id);
  if (!n.issued) mark_issued(id, n.issued_at);
  n.done = true;
  release(n.after_done);
  n.after_done.clear();
}

TaskId TaskGraph::ready(Lane lane) const {
  const Ready& queue = ready_[static_cast<std::size_t>(lane)];
  return queue.empty() ? no_task : queue.top().second;
}

void TaskGraph::take(Lane lane) { ready_[static_cast<std::size_t>(lane)].pop(); }

void TaskGraph::retire(std::vector<Event>& events) {
  while (!nodes_.empty() && nodes_.front().done) {
    events.push_back(std::move(nodes_.front().event));
    nodes_.pop_front();
    ++base_;
  }
}

std::string TaskGraph::who_waits(const ParameterLayout& layout) const {
  constexpr int shown = 4;
  std::string text;
  int count = 0;
  const auto name = [&](const Task& t) { return t.text(t.layer >= 0 ? layout.layer(t.layer).name : "-"); };
  for (const TaskNode& n : nodes_) {
    if (n.done || count == shown) continue;
    ++count;
    if (!text.empty()) text += "; ";
    text += fmt::format("{} ({})", name(n.task), n.issued ? "queued, not finished" : name_of(n.task.lane));
    if (n.issued) continue;
    for (const TaskId d : n.task.dependencies) {
      if (!known(d) || node(d).done) continue;
      text += " waits for " + name(node(d).task);
      break;
    }
  }
  return text.empty() ? "nothing is pending" : text;
}

}  // namespace tandem
