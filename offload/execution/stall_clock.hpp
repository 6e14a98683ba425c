#pragma once
// Clock of stalls: seconds that streams stand still in some places, without anybody stopping for it.
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/device/stream_marks.hpp"

namespace tandem {

class StallClock {
 public:
  /// `device` must outlive the clock. With so many places between two takings nothing is allocated.
  StallClock(Device& device, double watchdog_seconds, std::size_t places)
      : marks_(device, watchdog_seconds, 2 * places) {
    places_.reserve(places);
  }

  /// A place that `stream` reaches with all that was queued on it so far done. Does not block.
  std::uint32_t reach(StreamView stream) { return marks_.set(stream); }
  /// Marks that `stream` leaves the place once it has done the work queued since, which it waits for.
  void leave(std::uint32_t place, StreamView stream);
  /// Waits until streams are past all places. Seconds between reaching and leaving a place, of all places since the
  /// last call; those after `end` (trace_now's) left out. Throws StalledError where a stream stands still for
  /// `watchdog_seconds`.
  double take(double end);

 private:
  struct Place {
    std::uint32_t reached = 0;  ///< marks
    std::uint32_t left = 0;
  };
  StreamMarks marks_;
  std::vector<Place> places_;
};

}  // namespace tandem
