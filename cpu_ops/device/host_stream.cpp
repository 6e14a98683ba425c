#include "cpu_ops/device/host_stream.hpp"

#include <algorithm>
#include <utility>

#include "core/base/error.hpp"
#include "core/base/start_thread.hpp"

namespace tandem {

TaskName::TaskName(std::string_view name) noexcept
    : size_(static_cast<std::uint8_t>(std::min(name.size(), text_.size()))) {
  std::copy_n(name.data(), size_, text_.data());
}

HostStream::HostStream(std::string_view name, const void* owner, std::shared_ptr<const TaskHook> hook)
    : name_(name), owner_(owner), hook_(std::move(hook)) {
  worker_ = start_thread(name_, [this] { serve(); });
}

HostStream::~HostStream() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
    work_.notify_one();
  }
  worker_.join();
}

void HostStream::enqueue(std::string_view name, std::function<void()> work) {
  if (!work) throw MisuseError("empty task '" + std::string(name) + "' queued on stream '" + name_ + "'");
  push({.name = TaskName(name), .work = std::move(work)});
}

void HostStream::enqueue_record(std::shared_ptr<EventRecord> record) {
  if (all_done()) return record->pass(nullptr);
  push({.name = TaskName("record"), .record = std::move(record)});
}

void HostStream::enqueue_wait(std::shared_ptr<EventRecord> record) {
  if (all_done() && record->passed_well()) return;
  push({.name = TaskName("wait"), .awaited = std::move(record)});
}

void HostStream::enqueue_call(std::function<void(std::exception_ptr)> then) {
  if (!then) throw MisuseError("empty call queued on stream '" + name_ + "'");
  if (all_done()) return then(nullptr);
  push({.name = TaskName("call"), .then = std::move(then)});
}

/// Whether nothing is queued or running, and nothing has failed, that the hook does not have to see.
bool HostStream::all_done() {
  if (hook_ && *hook_) return false;
  const std::lock_guard lock(mutex_);
  return finished_ == queued_ && !error_;
}

void HostStream::push(Task task) {
  const std::lock_guard lock(mutex_);
  queue_.push_back(std::move(task));
  ++queued_;
  if (idle_) work_.notify_one();
}

void HostStream::synchronize() {
  if (std::this_thread::get_id() == worker_.get_id()) {
    throw MisuseError("a task of stream '" + name_ + "' synchronizes with it", "it would wait for itself");
  }
  std::unique_lock lock(mutex_);
  const std::uint64_t goal = queued_;
  ++synchronizing_;
  done_.wait(lock, [&] { return finished_ >= goal; });
  --synchronizing_;
  if (error_) std::rethrow_exception(error_);
}

void HostStream::serve() noexcept {
  std::unique_lock lock(mutex_);
  for (;;) {
    idle_ = true;
    work_.wait(lock, [this] { return !queue_.empty() || ending_; });
    idle_ = false;
    if (queue_.empty()) return;
    {
      Task task = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      run(task);
    }  // The closure, and what it holds, goes before the task counts as done.
    lock.lock();
    ++finished_;
    if (synchronizing_ > 0) done_.notify_all();
  }
}

// Only this thread writes error_, so it may read it without the lock.
void HostStream::run(Task& task) noexcept {
  if (!error_) attempt(task);
  if (task.record) task.record->pass(error_);
  if (task.then) task.then(error_);
}

void HostStream::attempt(Task& task) noexcept {
  std::exception_ptr failure;
  try {
    if (hook_ && *hook_) (*hook_)(name_, task.name.text());
    if (task.work) task.work();
    if (task.awaited) failure = task.awaited->wait();
  } catch (...) {
    failure = std::current_exception();
  }
  if (!failure) return;
  const std::lock_guard lock(mutex_);
  error_ = std::move(failure);
}

}  // namespace tandem
