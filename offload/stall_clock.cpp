#include "offload/stall_clock.hpp"

#include <algorithm>
#include <exception>

#include "core/trace.hpp"

namespace tandem {

StallClock::~StallClock() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return ahead_ == 0; });
}

std::uint32_t StallClock::reach(StreamView stream) {
  std::uint32_t place = 0;
  {
    const std::lock_guard lock(mutex_);
    place = static_cast<std::uint32_t>(places_.size());
    places_.emplace_back();
  }
  mark(place, Mark::reached, stream);
  return place;
}

void StallClock::leave(std::uint32_t place, StreamView stream) { mark(place, Mark::left, stream); }

void StallClock::mark(std::uint32_t place, Mark mark, StreamView stream) {
  // No more is captured than a std::function holds without allocating.
  device_.call_after(stream, [this, place, mark](std::exception_ptr) { pass(place, mark); });
  // Counted last: a mark that was refused is not waited for. The stream may have passed it by now.
  const std::lock_guard lock(mutex_);
  ++ahead_;
}

void StallClock::pass(std::uint32_t place, Mark mark) {
  const std::lock_guard lock(mutex_);
  (mark == Mark::reached ? places_[place].reached : places_[place].left) = trace_now();
  --ahead_;
  changed_.notify_all();  // while the lock is held: the clock may go as soon as it is not
}

double StallClock::take(double end) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return ahead_ == 0; });
  double seconds = 0.0;
  for (const Place& place : places_) seconds += std::max(0.0, std::min(place.left, end) - place.reached);
  places_.clear();
  return seconds;
}

}  // namespace tandem
