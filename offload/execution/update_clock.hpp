#pragma once
// Time between the first update of a step and its last, and whether updates are running.
#include <atomic>
#include <cstdint>

#include "scheduler/tasks/task.hpp"

namespace tandem {

/// Told of tasks by one thread at a time, under the executor's lock; read at any time.
class UpdateClock {
 public:
  void note_submitted(const Task& task) {
    if (is_update(task.kind) && count(1) == 1) begin();
  }
  void note_done(const Task& task) {
    if (is_update(task.kind) && count(-1) == 0) end();
  }

  bool running() const noexcept { return left_ > 0; }
  /// Time when the last update of a step was done, by trace_now().
  double ended() const noexcept { return ended_; }
  /// Seconds from the decision to update until the last update of the step was done, over all steps so far.
  double seconds() const noexcept { return seconds_; }

 private:
  /// Written under the lock alone: needs no read-modify-write.
  std::int64_t count(int by) noexcept {
    const std::int64_t left = left_.load(std::memory_order_relaxed) + by;
    left_.store(left, std::memory_order_release);
    return left;
  }
  void begin();
  void end();

  std::atomic<double> began_ = 0.0;
  std::atomic<double> ended_ = 0.0;
  std::atomic<std::int64_t> left_ = 0;  ///< updates submitted and not done
  std::atomic<double> seconds_ = 0.0;
};

}  // namespace tandem
