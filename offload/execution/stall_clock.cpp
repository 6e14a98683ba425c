#include "offload/execution/stall_clock.hpp"

#include <algorithm>

namespace tandem {

void StallClock::leave(std::uint32_t place, StreamView stream) { places_.push_back({place, marks_.set(stream)}); }

double StallClock::take(double end) {
  const std::vector<double>& passed = marks_.take();
  double seconds = 0.0;
  for (const Place& place : places_)
    seconds += std::max(0.0, std::min(passed[place.left], end) - passed[place.reached]);
  places_.clear();
  return seconds;
}

}  // namespace tandem
