#pragma once
// Time between the first update of a step and its last, and whether updates are running.
#include <atomic>
#include <cstdint>

#include "scheduler/tasks/task.hpp"

namespace tandem {

/// Told of tasks by one thread at a time, under the executor's lock; read at any time.
class UpdateClock {
 public:
  void note_submitted(const Task& task);
  void note_done(const Task& task);

  bool running() const noexcept { return left_ > 0; }
  /// Time when the last update of a step was done, by trace_now().
  double ended() const noexcept { return ended_; }
  /// Seconds from the decision to update until the last update of the step was done, over all steps so far.
  double seconds() const noexcept { return seconds_; }

 private:
  std::atomic<double> began_ = 0.0;
  std::atomic<double> ended_ = 0.0;
  std::atomic<std::int64_t> left_ = 0;  ///< updates submitted and not done
  std::atomic<double> seconds_ = 0.0;
};

}  // namespace tandem
