#include "offload/execution/task_accounts.hpp"

#include <algorithm>

namespace tandem {

void TaskAccounts::note_done(const TaskNode& node, double now) {
  const Task& task = node.task;
  const auto lane = static_cast<std::size_t>(task.lane);
  const bool known = graph_.dependencies_done(task.id);
  const double begin = known ? std::max({node.issued_at, node.ready_at, busy_until_[lane]}) : now;
  busy_until_[lane] = now;
  busy_[lane] += now - begin;
  if (task.kind == TaskKind::update_cpu || task.kind == TaskKind::speculate) cpu_update_busy_ += now - begin;
  if (trace_ == nullptr) return;
  const std::string& layer = layout_.layer(task.layer).name;
  trace_->span(name_of(task.lane), task.text(layer), begin, now, task.bytes);
}

/// Adds the union of the times that updates have waited for the save, which may overlap.
void TaskAccounts::note_save_done(TaskId save, double now) {
  double since = now;
  graph_.for_last_waiting(save, [&](const TaskNode& waiter) {
    if (is_update(waiter.task.kind)) since = std::min(since, waiter.ready_at);
  });
  save_waits_ += now - std::max(since, std::min(now, save_waits_until_));
  if (since < now) save_waits_until_ = now;
}

NamedRange TaskAccounts::told_range_of(const Task& task) const {
  return {*ranges_, name_of(task.lane), task.text(layout_.layer(task.layer).name), task.bytes};
}

LaneSeconds TaskAccounts::busy() const {
  const auto of = [this](Lane lane) { return busy_[static_cast<std::size_t>(lane)]; };
  return {.compute = of(Lane::caller),
          .host_to_device = of(Lane::host_to_device),
          .device_to_host = of(Lane::device_to_host),
          .device_update = of(Lane::device),
          .peers = of(Lane::peers),
          .cpu = of(Lane::cpu),
          .file_read = of(Lane::file_read),
          .file_write = of(Lane::file_write),
          .cpu_update = cpu_update_busy_};
}

}  // namespace tandem
