#include "offload/executor.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "core/error.hpp"

namespace tandem {

Executor::Executor(Device& device, const ParameterLayout& layout, TaskRunner& runner, Trace* trace,
                   double watchdog_seconds, bool overlap)
    : device_(device),
      layout_(layout),
      runner_(runner),
      trace_(trace),
      watchdog_seconds_(watchdog_seconds),
      overlap_(overlap),
      to_device_(device.make_stream("host to device")),
      to_host_(device.make_stream("device to host")),
      compute_(device.make_stream("device update")) {
  issuer_ = std::thread([this] { issue_loop(); });
  cpu_worker_ = std::thread([this] { cpu_loop(); });
}

Executor::~Executor() {
  {
    std::unique_lock lock(mutex_);
    stopping_ = true;
    work_.notify_all();
    progress_.notify_all();
  }
  issuer_.join();
  cpu_worker_.join();
  std::unique_lock lock(mutex_);
  progress_.wait(lock, [&] { return callbacks_ == 0; });
}

StreamView Executor::stream_of(Lane lane) const {
  switch (lane) {
    case Lane::host_to_device:
      return to_device_;
    case Lane::device_to_host:
      return to_host_;
    default:
      return compute_;
  }
}

Event Executor::new_event() {
  if (spare_events_.empty()) return device_.make_event();
  Event event = std::move(spare_events_.back());
  spare_events_.pop_back();
  return event;
}

void Executor::submit(std::vector<Task>& tasks) {
  std::unique_lock lock(mutex_);
  const double now = trace_now();
  for (Task& task : tasks) {
    if (on_submit) on_submit(task, now);
    Event event = task.lane == Lane::cpu ? Event() : new_event();
    graph_.add(std::move(task), std::move(event));
  }
  tasks.clear();
  work_.notify_all();
}

void Executor::finish_caller_task(TaskId id, StreamView stream) {
  std::unique_lock lock(mutex_);
  device_.record(graph_.node(id).event, stream);
  graph_.mark_issued(id, trace_now());
  ++steps_made_;
  ++callbacks_;
  work_.notify_all();
  lock.unlock();
  device_.call_after(stream, [this, id](std::exception_ptr error) { complete(id, std::move(error)); });
  if (overlap_) return;
  lock.lock();
  wait(lock, "one thing after another", [&] { return (!graph_.known(id) || graph_.node(id).done) && idle(); });
}

double Executor::stream_waits_for(std::span<const TaskId> tasks, StreamView stream, std::string_view what) {
  std::unique_lock lock(mutex_);
  const double blocked = wait(lock, what, [&] {
    for (const TaskId id : tasks) {
      if (!graph_.known(id)) continue;
      if (overlap_ ? !graph_.node(id).issued : !graph_.node(id).done) return false;
    }
    return true;
  });
  for (const TaskId id : tasks) {
    if (graph_.known(id) && graph_.node(id).event) device_.wait(stream, graph_.node(id).event);
  }
  return blocked;
}

double Executor::drain(std::string_view what) {
  std::unique_lock lock(mutex_);
  return wait(lock, what, [&] { return graph_.empty(); });
}

double Executor::wait_done(std::span<const TaskId> tasks, std::string_view what) {
  std::unique_lock lock(mutex_);
  return wait(lock, what, [&] {
    return std::none_of(tasks.begin(), tasks.end(),
                        [&](TaskId id) { return graph_.known(id) && !graph_.node(id).done; });
  });
}

TaskId Executor::oldest() {
  std::unique_lock lock(mutex_);
  return graph_.base();
}

template <class Predicate>
double Executor::wait(std::unique_lock<std::mutex>& lock, std::string_view what, Predicate done) {
  constexpr std::chrono::milliseconds tick(200);
  const double start = trace_now();
  double last_progress = start;
  std::uint64_t seen = steps_made_;
  while (!failure_ && !done()) {
    progress_.wait_for(lock, tick);
    const double now = trace_now();
    if (steps_made_ != seen) {
      seen = steps_made_;
      last_progress = now;
    } else if (now - last_progress > watchdog_seconds_ && !failure_ && !done()) {
      fail(std::make_exception_ptr(StalledError(
          fmt::format("{} made no progress for {:.0f} s", what, now - last_progress), graph_.who_waits(layout_))));
    }
  }
  if (failure_) std::rethrow_exception(failure_);
  return trace_now() - start;
}

void Executor::fail(std::exception_ptr error) {
  if (!failure_) failure_ = std::move(error);
  progress_.notify_all();
  work_.notify_all();
}

// -- device lanes ------------------------------------------------------------------------------------

bool Executor::may_start() const {
  return overlap_ || std::all_of(in_flight_.begin(), in_flight_.end(), [](int n) { return n == 0; });
}

bool Executor::idle() const {
  const auto nothing_ready = [&](Lane lane) { return graph_.ready(lane) == no_task; };
  return std::all_of(in_flight_.begin(), in_flight_.end(), [](int n) { return n == 0; }) &&
         nothing_ready(Lane::cpu) && std::all_of(device_lanes.begin(), device_lanes.end(), nothing_ready);
}

TaskId Executor::next_device_task() const {
  if (!may_start()) return no_task;
  for (const Lane lane : device_lanes) {
    if (in_flight_[static_cast<std::size_t>(lane)] >= queued_ahead) continue;
    const TaskId id = graph_.ready(lane);
    if (id != no_task) return id;
  }
  return no_task;
}

void Executor::issue_loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    work_.wait(lock, [&] { return stopping_ || (!failure_ && next_device_task() != no_task); });
    if (stopping_) return;
    try {
      issue(lock, next_device_task());
    } catch (...) {
      if (!lock.owns_lock()) lock.lock();
      fail(std::current_exception());
    }
  }
}

void Executor::issue(std::unique_lock<std::mutex>& lock, TaskId id) {
  TaskNode& node = graph_.node(id);  // stays in place: nodes leave only from the front, when done
  const Lane lane = node.task.lane;
  graph_.take(lane);
  const StreamView stream = stream_of(lane);
  for (const TaskId d : node.task.dependencies) {
    if (!graph_.known(d)) continue;
    const TaskNode& first = graph_.node(d);
    if (!first.done && first.event && first.task.lane != lane) device_.wait(stream, first.event);
  }
  ++in_flight_[static_cast<std::size_t>(lane)];
  ++callbacks_;
  lock.unlock();
  try {
    runner_.issue(node.task, stream);
    device_.record(node.event, stream);
  } catch (...) {
    lock.lock();
    --callbacks_;
    throw;
  }
  lock.lock();
  graph_.mark_issued(id, trace_now());
  ++steps_made_;
  progress_.notify_all();
  work_.notify_all();
  lock.unlock();
  device_.call_after(stream, [this, id](std::exception_ptr error) { complete(id, std::move(error)); });
  lock.lock();
}

void Executor::complete(TaskId id, std::exception_ptr error) {
  std::unique_lock lock(mutex_);
  const TaskNode& node = graph_.node(id);
  const auto lane = static_cast<std::size_t>(node.task.lane);
  const double now = trace_now();
  if (node.task.lane != Lane::caller) --in_flight_[lane];
  if (trace_ && !error) {
    const double begin = std::max(node.issued_at, lane_busy_until_[lane]);
    if (node.task.lane != Lane::caller) {
      trace_->span(name_of(node.task.lane), node.task.text(layout_.layer(node.task.layer).name), begin, now,
                   node.task.bytes);
    }
    lane_busy_until_[lane] = now;
  }
  if (error) {
    fail(std::move(error));
  } else {
    if (on_done) on_done(node.task, now);
    graph_.mark_done(id);
    graph_.retire(spare_events_);
    std::erase_if(spare_events_, [](const Event& e) { return !e; });
  }
  ++steps_made_;
  --callbacks_;
  progress_.notify_all();
  work_.notify_all();
}

// -- CPU lane ------------------------------------------------------------------------------------------

void Executor::cpu_loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    work_.wait(lock, [&] { return stopping_ || (!failure_ && may_start() && graph_.ready(Lane::cpu) != no_task); });
    if (stopping_) return;
    const TaskId id = graph_.ready(Lane::cpu);
    graph_.take(Lane::cpu);
    TaskNode& node = graph_.node(id);
    node.issued_at = trace_now();
    ++in_flight_[static_cast<std::size_t>(Lane::cpu)];
    ++callbacks_;
    lock.unlock();
    std::exception_ptr error;
    try {
      runner_.run(node.task);
    } catch (...) {
      error = std::current_exception();
    }
    complete(id, std::move(error));
    lock.lock();
  }
}

}  // namespace tandem
