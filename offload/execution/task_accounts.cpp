#include "offload/execution/task_accounts.hpp"

#include <algorithm>

namespace tandem {

void TaskAccounts::add_span(const Task& task, double begin, double end) const {
  const std::string& layer = layer_at(layout_, task.layer).name;
  trace_->span(name_of(task.lane), task.text(layer), begin, end, task.bytes);
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
  return {*ranges_, name_of(task.lane), task.text(layer_at(layout_, task.layer).name), task.bytes};
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
