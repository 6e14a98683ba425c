#pragma once
// Marks on streams, with the time when each was passed and without anybody stopping for it: the device calls back as
// soon as a stream passes a mark, and the callback reads the clock.
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "core/device/device.hpp"

namespace tandem {

/// Marks are set and taken by one thread at a time.
class StreamMarks {
 public:
  /// `device` must outlive the marks. `room`: as many marks between two calls of `take` allocate nothing.
  /// `watchdog_seconds`: how long a stream may stand still before a mark.
  StreamMarks(Device& device, double watchdog_seconds, std::size_t room = 0)
      : device_(device), watchdog_seconds_(watchdog_seconds) {
    times_.reserve(room);
  }
  /// Waits until all have passed. A stall is told (`report_stall`), and waited for.
  ~StreamMarks();
  StreamMarks(const StreamMarks&) = delete;
  StreamMarks& operator=(const StreamMarks&) = delete;

  /// Sets a mark behind all that was queued on `stream` so far. Does not block. Returns its index since the last
  /// `take`, by which the next one has its time. Throws what the device throws; then no mark is set.
  std::uint32_t set(StreamView stream);
  /// Waits until all marks have passed. Returns when each did, by trace_now's clock, in the order in which they were
  /// set; valid until the next `take`. A failed stream passes its marks: its error reaches whoever uses the stream.
  /// Throws StalledError where no mark is passed for long; all marks are then still there.
  const std::vector<double>& take();

 private:
  void pass(std::uint32_t mark);
  template <class OnStall>
  void wait(std::unique_lock<std::mutex>& lock, OnStall on_stall);

  Device& device_;
  double watchdog_seconds_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t passed_ = 0;
  std::vector<double> times_;  ///< times of the marks set since the last `take`
  std::vector<double> taken_;
};

}  // namespace tandem
