#pragma once
// Events of the host device. Internal to cpu_ops.
#include <chrono>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>

#include "core/device/device.hpp"

namespace tandem {

/// One mark in one stream: passed once, with the error of that stream where it failed. Thread-safe.
/// Whoever waits shares the record, so an event may be destroyed or recorded again under a waiter.
class EventRecord {
 public:
  void pass(std::exception_ptr error) noexcept;
  /// Whether it has passed without an error.
  bool passed_well();
  /// Blocks until passed; returns the error carried, or null.
  std::exception_ptr wait();
  /// Blocks until passed or until the time is over; returns whether it has passed. Rethrows the error carried.
  bool wait_for(std::chrono::milliseconds time);

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool passed_ = false;
  std::exception_ptr error_;
};

class HostEvent final : public EventImpl {
 public:
  /// The last record; null where there is none, which counts as complete.
  std::shared_ptr<EventRecord> latest() const;
  /// Called once the record is queued. Publishing it earlier would let a waiter queue its wait ahead
  /// of the record on the same stream: that stream would wait for itself. This way every wait is for
  /// a record queued before it, so that waits cannot form a circle.
  void publish(std::shared_ptr<EventRecord> record);

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<EventRecord> latest_;
};

}  // namespace tandem
