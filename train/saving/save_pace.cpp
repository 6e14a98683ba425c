#include "train/saving/save_pace.hpp"

#include <algorithm>
#include <chrono>
#include <utility>

#include "core/base/trace.hpp"

namespace tandem {

PaceClock PaceClock::real() {
  return {&trace_now, [](std::condition_variable& changed, std::unique_lock<std::mutex>& lock, double until) {
            changed.wait_for(lock, std::chrono::duration<double>(until - trace_now()));
          }};
}

SavePace::SavePace(std::function<bool()> urgent, PaceClock clock)
    : urgent_(std::move(urgent)), clock_(std::move(clock)) {}

void SavePace::begin(std::uint64_t bytes, SaveInterval interval) {
  const std::lock_guard lock(mutex_);
  interval_ = interval;
  steps_left_ = interval.steps;
  hurried_ = false;
  bytes_left_ = bytes;
  bytes_written_ = busy_seconds_ = 0.0;
  aim();
}

void SavePace::note_step(double seconds) {
  {
    const std::lock_guard lock(mutex_);
    interval_.step_seconds = seconds;
    --steps_left_;
    aim();
  }
  changed_.notify_all();
}

void SavePace::hurry() {
  {
    const std::lock_guard lock(mutex_);
    hurried_ = true;
  }
  changed_.notify_all();
}

/// Sets the time when the save is due, with steps as long as the last one was.
void SavePace::aim() {
  const double gone = static_cast<double>(interval_.steps - steps_left_) * interval_.step_seconds;
  due_ = clock_.now() + interval_.usable() - gone;
}

void SavePace::wrote(std::size_t bytes, double seconds) {
  std::unique_lock lock(mutex_);
  const double end = clock_.now();
  bytes_left_ -= std::min<std::uint64_t>(bytes_left_, bytes);
  bytes_written_ += static_cast<double>(bytes);
  busy_seconds_ += seconds;
  while (true) {
    const double until = end + rest_after(bytes, seconds, end);
    if (clock_.now() >= until) return;
    clock_.wait(changed_, lock, until);
  }
}

/// Seconds to rest behind a piece that was written until `end`, as things stand now.
double SavePace::rest_after(std::size_t bytes, double seconds, double end) const {
  if (hurried_ || bytes_left_ == 0 || (urgent_ && urgent_())) return 0.0;
  // Seconds for each of the remaining pieces, if all are to be in time.
  const double each = (due_ - end) * static_cast<double>(bytes) / static_cast<double>(bytes_left_);
  return std::clamp(each - seconds, 0.0, seconds * (1.0 / busy_share - 1.0));
}

double SavePace::disk() const {
  const std::lock_guard lock(mutex_);
  return busy_seconds_ > 0.0 ? bytes_written_ / busy_seconds_ : 0.0;
}

double SavePace::seconds_beside(double alone, double usable) noexcept {
  return std::clamp(usable, alone, alone / busy_share);
}

int PacedFiles::write(int fd, const void* data, std::size_t bytes, std::size_t& written) {
  const double begin = pace_.now();
  const int error = FileOps::write(fd, data, bytes, written);
  if (error == 0) pace_.wrote(written, pace_.now() - begin);
  return error;
}

}  // namespace tandem
