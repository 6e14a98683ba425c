#include "cpu_ops/device/host_event.hpp"

#include <utility>

namespace tandem {

void EventRecord::pass(std::exception_ptr error) noexcept {
  const std::lock_guard lock(mutex_);
  error_ = std::move(error);
  passed_ = true;
  changed_.notify_all();
}

bool EventRecord::passed_well() {
  const std::lock_guard lock(mutex_);
  return passed_ && !error_;
}

std::exception_ptr EventRecord::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return passed_; });
  return error_;
}

bool EventRecord::wait_for(std::chrono::milliseconds time) {
  std::unique_lock lock(mutex_);
  if (!changed_.wait_for(lock, time, [this] { return passed_; })) return false;
  if (error_) std::rethrow_exception(error_);
  return true;
}

std::shared_ptr<EventRecord> HostEvent::latest() const {
  const std::lock_guard lock(mutex_);
  return latest_;
}

void HostEvent::publish(std::shared_ptr<EventRecord> record) {
  const std::lock_guard lock(mutex_);
  latest_ = std::move(record);
}

}  // namespace tandem
