#include "offload/execution/executor.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "core/base/error.hpp"
#include "core/base/start_thread.hpp"

namespace tandem {
namespace {

constexpr std::string_view all_queued = "the end of what is queued";

/// Lanes of the device whose tasks each thread queues.
std::vector<LaneSet> lanes_of_issuers(Copies copies, bool peers) {
  const LaneSet own = LaneSet(device_lanes).without(LaneSet(Lane::peers));
  std::vector<LaneSet> lanes;
  if (copies == Copies::async) lanes.push_back(own);
  for (LaneSet left = own; copies == Copies::block && !left.empty(); left.remove(left.first())) {
    lanes.emplace_back(left.first());
  }
  if (peers) lanes.emplace_back(Lane::peers);
  return lanes;
}

}  // namespace

Executor::Executor(const ExecutorParts& parts)
    : device_(parts.device),
      layout_(parts.layout),
      runner_(parts.runner),
      watchdog_seconds_(parts.watchdog_seconds),
      overlap_(parts.overlap),
      updates_(parts.updates),
      accounts_(graph_, layout_, parts.trace, device_.ranges()),
      served_(LaneSet(device_lanes) | LaneSet(parts.worker_lanes)),
      group_(parts.group),
      streams_(device_, graph_, group_ != nullptr),
      issuers_(lanes_of_issuers(parts.copies, group_ != nullptr).size()),
      workers_(parts.worker_lanes.size()) {
  const auto lanes = lanes_of_issuers(parts.copies, group_ != nullptr);
  try {
    for (std::size_t i = 0; i < issuers_.size(); ++i) {
      Worker& issuer = issuers_[i];
      issuer.lanes = lanes[i];
      issuer.thread = start_thread("task issuer", [this, &issuer] { issue_loop(issuer); });
    }
    for (std::size_t i = 0; i < workers_.size(); ++i) {
      Worker& worker = workers_[i];
      const Lane lane = parts.worker_lanes[i];
      worker.lanes.add(lane);
      worker.thread = start_thread(fmt::format("{} tasks", name_of(lane)), [this, &worker] { work_loop(worker); });
    }
  } catch (...) {
    end_threads();
    throw;
  }
}

Executor::~Executor() {
  end_threads();
  await_calls();
  // Work queued before a call that threw has no call after it, and streams wait for it silently when they go.
  streams_.wait_to_the_end(all_queued, watchdog_seconds_);
  if (group_ != nullptr) group_->leave();  // before the memory goes that others may still read
}

/// A lost device may keep streams of others waiting for good: that is told, and waited for, since they use memory that
/// goes after this.
void Executor::await_calls() {
  std::unique_lock lock(mutex_);
  const auto all_made = [this] { return callbacks_ == 0; };
  caller_.wanted = all_made;
  ProgressWatch progress(watchdog_seconds_, steps_made_);
  while (!caller_.wakes.wait_for(lock, watch_tick, all_made)) {
    const auto seconds = progress.stalled(steps_made_);
    if (seconds) report_stall(stalled(all_queued, *seconds, device_.info().name));
  }
}

void Executor::end_threads() {
  {
    std::unique_lock lock(mutex_);
    stopping_ = true;
    wake_all();
    // The issuing threads may wait for other ranks, and those for what will not come.
    if (group_ != nullptr && !graph_.empty()) {
      group_->fail(std::make_exception_ptr(DeviceError("the engine of a rank ended before its work")));
    }
  }
  for (Worker& issuer : issuers_) {
    if (issuer.thread.joinable()) issuer.thread.join();
  }
  for (Worker& worker : workers_) {
    if (worker.thread.joinable()) worker.thread.join();
  }
}

inline Event Executor::new_event() {
  if (spare_events_.empty()) return device_.make_event();
  Event event = std::move(spare_events_.back());
  spare_events_.pop_back();
  return event;
}

void Executor::submit(TaskList& tasks) {
  std::unique_lock lock(mutex_);
  const double now = trace_now();
  for (std::size_t i = 0; i < tasks.size(); ++i) {
    updates_.note_submitted(tasks[i]);
    graph_.add(tasks[i], tasks.dependencies(i), now);  // it is ready later where something that it depends on is
  }
  tasks.clear();
  wake();
}

// -- the caller's thread -----------------------------------------------------------------------------

double Executor::begin_caller_task(TaskId id, StreamView stream, std::string_view what) {
  std::unique_lock lock(mutex_);
  const LayerIndex layer = graph_.node(id).task.layer;
  graph_.node(id).issued_at = trace_now();
  const double blocked = wait(lock, caller_, what, layer, [&] {
    return overlap_ ? graph_.node(id).waiting_for == 0 : graph_.dependencies_done(id);
  });
  graph_.for_unfinished(id, [&](const TaskNode& first) { device_.wait(stream, first.event); });
  if (TaskNode& node = graph_.node(id); !node.range)
    node.range = accounts_.range_of(node.task);  // begun again on another stream
  return blocked;
}

void Executor::finish_caller_task(TaskId id, StreamView stream) {
  std::unique_lock lock(mutex_);
  ++callbacks_;
  graph_.node(id).range.end();
  try {
    const EventView event = graph_.node(id).event = new_event();
    device_.record(event, stream);
    graph_.mark_issued(id);
    ++steps_made_;
    wake();
    lock.unlock();
    device_.call_after(stream, [this, id](const std::exception_ptr& error) { complete(id, error); });
  } catch (...) {
    if (!lock.owns_lock()) lock.lock();
    --callbacks_;
    fail(std::current_exception());  // the task will never be done
    throw;
  }
  if (overlap_) return;
  lock.lock();
  wait(lock, caller_, "one thing after another", {}, [&] { return graph_.done(id) && idle(); });
}

void Executor::require_good() {
  if (!failed_) return;
  const std::lock_guard lock(mutex_);
  if (failure_) std::rethrow_exception(failure_);
}

double Executor::drain(std::string_view what) {
  std::unique_lock lock(mutex_);
  return wait(lock, caller_, what, {}, [&] { return graph_.empty(); });
}

double Executor::wait_done(std::span<const TaskId> tasks, std::string_view what) {
  std::unique_lock lock(mutex_);
  return wait(lock, caller_, what, {}, [this, left = tasks]() mutable {
    while (!left.empty() && graph_.done(left.front())) left = left.subspan(1);
    return left.empty();
  });
}

void Executor::give_up(std::exception_ptr error) {
  std::unique_lock lock(mutex_);
  fail(std::move(error));
}

TaskId Executor::oldest() {
  std::unique_lock lock(mutex_);
  return graph_.begin();
}

LaneSeconds Executor::busy() {
  const std::lock_guard lock(mutex_);
  return accounts_.busy();
}

/// Waits until `done` holds. `layer` is what it is about, or -1.
template <class Predicate>
double Executor::wait(std::unique_lock<BriefMutex>& lock, Waiter& waiter, std::string_view what, LayerIndex layer,
                      Predicate done) {
  constexpr std::chrono::milliseconds tick(200);
  if (failure_) std::rethrow_exception(failure_);
  if (done()) return 0.0;
  const double start = trace_now();
  ProgressWatch progress(watchdog_seconds_, steps_made_);
  const struct End {
    Waiter& waiter;
    ~End() { waiter.wanted = nullptr; }  // also where watching throws: nobody is to ask for what is gone
  } end{waiter};
  while (!failure_ && !done()) {
    waiter.wanted = std::ref(done);  // anew: what was so when it was woken may be so no longer
    waiter.wakes.wait_for(lock, tick);
    if (!failure_ && !done()) watch(progress, what, layer);
  }
  if (failure_) std::rethrow_exception(failure_);
  return trace_now() - start;
}

/// Fails the run where nothing has moved for too long.
void Executor::watch(ProgressWatch& progress, std::string_view what, LayerIndex layer) {
  if (among_ranks_) ++steps_made_;  // the group has a watchdog, which knows whom all wait for
  const auto seconds = progress.stalled(steps_made_);
  if (!seconds) return;
  const std::string whom = layer.none() ? "" : " " + layer_at(layout_, layer).name;
  const StalledError error(fmt::format("{}{} made no progress for {:.0f} s", what, whom, *seconds),
                           graph_.who_waits(layout_));
  report_stall(error);
  fail(std::make_exception_ptr(error));
}

void Executor::fail(std::exception_ptr error) {
  if (!failure_) {
    failure_ = std::move(error);
    failed_ = true;
    if (group_ != nullptr) group_->fail(failure_);
  }
  wake_all();
}

// -- who sleeps and who wakes --------------------------------------------------------------------------

template <class Predicate>
void Executor::sleep_until(std::unique_lock<BriefMutex>& lock, Worker& worker, Predicate ready) {
  while (!ready()) {
    asleep_ = asleep_ | worker.lanes;
    worker.wakes.wait(lock);
    asleep_ = asleep_.without(worker.lanes);
  }
}

/// Wakes threads; called after every change, with the lock held. Waking a thread takes longer than all else that is
/// done here for a task: only threads that sleep are woken, and only where there is something to do for them.
inline void Executor::wake() {
  if (dropped_saves_end_ > TaskId(0)) pass_dropped_saves();
  if (!(asleep_ & startable()).empty()) wake_workers();
  if (caller_.wanted) wake(caller_);
  if (saver_.wanted) wake(saver_);
}

/// Wakes the workers that sleep and have a task.
void Executor::wake_workers() {
  for (std::vector<Worker>* const all : {&issuers_, &workers_}) {
    for (Worker& worker : *all) {
      if ((asleep_ & worker.lanes).empty() || next_task(worker) == no_task) continue;
      asleep_ = asleep_.without(worker.lanes);
      worker.wakes.notify_one();
    }
  }
}

void Executor::wake(Waiter& waiter) {
  if (!waiter.wanted()) return;
  waiter.wanted = nullptr;
  waiter.wakes.notify_all();
}

void Executor::wake_all() {
  for (Worker& issuer : issuers_) issuer.wakes.notify_all();
  for (Worker& worker : workers_) worker.wakes.notify_all();
  caller_.wakes.notify_all();
  saver_.wakes.notify_all();
}

// -- device lanes ------------------------------------------------------------------------------------

inline TaskId Executor::next_task(const Worker& worker) const {
  const LaneSet lanes = startable() & worker.lanes;
  return lanes.empty() || failure_ || !may_start() ? no_task : graph_.ready(lanes.first());
}

void Executor::issue_loop(Worker& issuer) {
  wake_promptly();
  std::unique_lock lock(mutex_);
  while (true) {
    TaskId id = no_task;
    sleep_until(lock, issuer, [&] { return stopping_ || (id = next_task(issuer)) != no_task; });
    if (stopping_) return;
    try {
      issue(lock, id);
    } catch (...) {
      if (!lock.owns_lock()) lock.lock();
      fail(std::current_exception());
    }
  }
}

void Executor::issue(std::unique_lock<BriefMutex>& lock, TaskId id) {
  TaskNode& node = graph_.node(id);
  const Task task = node.task;
  graph_.take(task.lane);
  const StreamView stream = streams_.stream_for(id, task.lane);
  graph_.for_unfinished(id, [&](const TaskNode& first) {
    if (first.task.lane != task.lane) device_.wait(stream, first.event);
  });
  const EventView event = node.event = new_event();
  node.issued_at = trace_now();
  load_.add(task.lane);
  ++callbacks_;
  if (task.lane == Lane::peers) among_ranks_ = true;
  lock.unlock();
  try {
    const NamedRange range = accounts_.range_of(task);
    runner_.issue(task, stream);
    device_.record(event, stream);
    device_.call_after(stream, [this, id](const std::exception_ptr& error) { complete(id, error); });
  } catch (...) {
    lock.lock();
    --callbacks_;
    if (task.lane == Lane::peers) among_ranks_ = false;
    throw;
  }
  lock.lock();
  if (task.lane == Lane::peers) among_ranks_ = false;
  if (graph_.done(id)) return;
  graph_.mark_issued(id);
  ++steps_made_;
  wake();
}

/// Completes a task; called on a thread of the device's, or within `call_after`.
void Executor::complete(TaskId id, const std::exception_ptr& error) {
  std::unique_lock lock(mutex_);
  finish(id, error);
  --callbacks_;
  wake();
}

void Executor::finish(TaskId id, const std::exception_ptr& error) {
  TaskNode& node = graph_.node(id);
  const Task& task = node.task;
  if (task.lane != Lane::caller) load_.remove(task.lane);
  ++steps_made_;
  if (error) return fail(error);
  try {  // this may be a thread of the device's, on which nobody would catch what a trace may throw
    const double now = trace_now();
    accounts_.note_done(node, now);
    if (task.lane == Lane::disk) accounts_.note_save_done(id, now);
    updates_.note_done(task);
    if (node.event) spare_events_.push_back(std::move(node.event));
    graph_.mark_done(id, now);
  } catch (...) {
    fail(std::current_exception());
  }
}

// -- lanes of workers ------------------------------------------------------------------------------------------

void Executor::work_loop(Worker& worker) {
  std::unique_lock lock(mutex_);
  while (true) {
    TaskId id = no_task;
    sleep_until(lock, worker, [&] { return stopping_ || (id = next_task(worker)) != no_task; });
    if (stopping_) return;
    TaskNode& node = graph_.node(id);
    const Task task = node.task;
    graph_.take(task.lane);
    node.issued_at = trace_now();
    load_.add(task.lane);
    lock.unlock();
    std::exception_ptr error;
    try {
      const NamedRange range = accounts_.range_of(task);
      runner_.run(task);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    finish(id, error);
    wake();
  }
}

// -- save tasks ----------------------------------------------------------------------------------------

void Executor::begin_save_task(TaskId id) {
  std::unique_lock lock(mutex_);
  wait(lock, saver_, "saving layer", graph_.node(id).task.layer,
       [&] { return graph_.ready(Lane::disk) == id && may_start(); });
  graph_.take(Lane::disk);
  TaskNode& node = graph_.node(id);
  node.issued_at = trace_now();
  node.range = accounts_.range_of(node.task);
  load_.add(Lane::disk);
}

void Executor::note_save_progress() {
  const std::unique_lock lock(mutex_);
  ++steps_made_;
}

void Executor::finish_save_task(TaskId id) {
  const std::unique_lock lock(mutex_);
  graph_.node(id).range.end();
  finish(id, nullptr);
  wake();
}

void Executor::drop_save_tasks(TaskId end) noexcept {
  const std::unique_lock lock(mutex_);
  dropped_saves_end_ = std::max(dropped_saves_end_, end);
  wake();
}

/// Passes save tasks that were dropped, once they are ready. They keep their place behind their dependencies: whoever
/// waits for them waits through them for more.
void Executor::pass_dropped_saves() {
  for (TaskId id = graph_.ready(Lane::disk); id != no_task && id < dropped_saves_end_; id = graph_.ready(Lane::disk)) {
    graph_.take(Lane::disk);
    graph_.mark_done(id, trace_now());
    ++steps_made_;
  }
}

double Executor::save_wait_seconds() {
  const std::unique_lock lock(mutex_);
  return accounts_.save_wait_seconds();
}

}  // namespace tandem
