#pragma once
// How long streams stand still in some places, without anybody stopping for it.
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "core/device.hpp"

namespace tandem {

class StallClock {
 public:
  /// `device` must outlive the clock. With so many places between two takings nothing is allocated.
  StallClock(Device& device, std::size_t places) : device_(device) { places_.reserve(places); }
  /// Waits until all marks have passed.
  ~StallClock();
  StallClock(const StallClock&) = delete;
  StallClock& operator=(const StallClock&) = delete;

  /// A place that `stream` reaches with all that was queued on it so far done. Does not block.
  std::uint32_t reach(StreamView stream);
  /// ... and that it leaves when it has done what has been queued since: what it waits for.
  void leave(std::uint32_t place, StreamView stream);
  /// Waits until all marks have passed. Seconds between reaching and leaving a place, of all places since the last
  /// call; those after `end` (trace_now's) left out. A failed stream passes its marks.
  double take(double end);

 private:
  struct Place {
    double reached = 0.0;
    double left = 0.0;
  };
  enum class Mark : std::uint32_t { reached, left };
  void mark(std::uint32_t place, Mark mark, StreamView stream);
  void pass(std::uint32_t place, Mark mark);

  Device& device_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int ahead_ = 0;  ///< marks that streams have not passed; those passed before they are counted make it less
  std::vector<Place> places_;
};

}  // namespace tandem
