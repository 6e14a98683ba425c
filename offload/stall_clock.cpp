#include "offload/stall_clock.hpp"

#include <algorithm>
#include <exception>

#include "core/trace.hpp"

namespace tandem {

StallClock::~StallClock() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return ahead_ == 0; });
}

std::size_t StallClock::reach(StreamView stream) {
  std::size_t place = 0;
  {
    const std::lock_guard lock(mutex_);
    place = places_.size();
    places_.emplace_back();
  }
  mark(place, &Place::reached, stream);
  return place;
}

void StallClock::leave(std::size_t place, StreamView stream) { mark(place, &Place::left, stream); }

void StallClock::mark(std::size_t place, double Place::*time, StreamView stream) {
  device_.call_after(stream, [this, place, time](std::exception_ptr) {
    const std::lock_guard lock(mutex_);
    places_[place].*time = trace_now();
    --ahead_;
    changed_.notify_all();  // while the lock is held: the clock may go as soon as it is not
  });
  // Counted last: a mark that was refused is not waited for. The stream may have passed it by now.
  const std::lock_guard lock(mutex_);
  ++ahead_;
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
