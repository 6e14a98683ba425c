#pragma once
// When streams pass some places, without anybody stopping for it: the device calls back as soon as a stream passes a
// mark, and whoever is called looks at the clock.
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "core/device.hpp"

namespace tandem {

/// Marks are set and taken by one thread at a time.
class StreamMarks {
 public:
  /// `device` must outlive the marks. So many between two takings allocate nothing.
  explicit StreamMarks(Device& device, std::size_t room = 0) : device_(device) { times_.reserve(room); }
  /// Waits until all have passed.
  ~StreamMarks();
  StreamMarks(const StreamMarks&) = delete;
  StreamMarks& operator=(const StreamMarks&) = delete;

  /// Behind all that was queued on `stream` so far. Does not block. The how manieth it is since the last taking. Throws
  /// what the device refuses it with; such a mark is none.
  std::uint32_t set(StreamView stream);
  /// Waits until all have passed: when (trace_now's) each did, in the order in which they were set. A failed stream
  /// passes its marks; the error itself reaches whoever uses the stream. Valid until the next is set.
  const std::vector<double>& take();

 private:
  void pass(std::uint32_t mark);
  void wait(std::unique_lock<std::mutex>& lock);

  Device& device_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t passed_ = 0;
  std::vector<double> times_;  ///< of those set since the last taking
  std::vector<double> taken_;
};

}  // namespace tandem
