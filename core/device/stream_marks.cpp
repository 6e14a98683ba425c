#include "core/device/stream_marks.hpp"

#include <exception>
#include <utility>

#include "core/base/stall.hpp"
#include "core/base/trace.hpp"

namespace tandem {

StreamMarks::~StreamMarks() {
  std::unique_lock lock(mutex_);
  wait(lock, [](const StalledError& error) { report_stall(error); });
}

std::uint32_t StreamMarks::set(StreamView stream) {
  std::uint32_t mark = 0;
  {
    const std::lock_guard lock(mutex_);
    mark = static_cast<std::uint32_t>(times_.size());
    times_.push_back(0.0);
  }
  try {
    // No more is captured than a std::function holds without allocating.
    device_.call_after(stream, [this, mark](const std::exception_ptr&) { pass(mark); });
  } catch (...) {
    const std::lock_guard lock(mutex_);
    times_.pop_back();  // else it would be waited for
    throw;
  }
  return mark;
}

void StreamMarks::pass(std::uint32_t mark) {
  const std::lock_guard lock(mutex_);
  times_[mark] = trace_now();
  ++passed_;
  changed_.notify_all();  // while the lock is held: the marks may go as soon as it is not
}

template <class OnStall>
void StreamMarks::wait(std::unique_lock<std::mutex>& lock, OnStall on_stall) {
  ProgressWatch progress(watchdog_seconds_, passed_);
  while (!changed_.wait_for(lock, watch_tick, [this] { return passed_ == times_.size(); })) {
    if (const auto seconds = progress.stalled(passed_)) on_stall(stalled("a stream", *seconds, device_.info().name));
  }
}

const std::vector<double>& StreamMarks::take() {
  std::unique_lock lock(mutex_);
  wait(lock, [](const StalledError& error) {
    report_stall(error);
    throw error;
  });
  taken_.swap(times_);
  times_.clear();
  passed_ = 0;
  return taken_;
}

}  // namespace tandem
