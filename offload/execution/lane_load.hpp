#pragma once
// Tasks in flight, by lane.
#include <array>
#include <cstddef>

#include "scheduler/tasks/lane_set.hpp"
#include "scheduler/tasks/task.hpp"
#include "scheduler/tasks/task_graph.hpp"

namespace tandem {

/// Numbers of tasks that were started and are not done. Guarded by its owner.
class LaneLoad {
 public:
  void add(Lane lane) noexcept {
    ++all_;
    if (++in_flight_[static_cast<std::size_t>(lane)] >= queued_ahead(lane) && is_of_device(lane)) full_.add(lane);
  }
  void remove(Lane lane) noexcept {
    --all_;
    if (--in_flight_[static_cast<std::size_t>(lane)] < queued_ahead(lane)) full_.remove(lane);
  }
  /// Whether there are none.
  bool none() const noexcept { return all_ == 0; }
  /// Lanes of the device that have as many as may be queued (`queued_ahead`).
  LaneSet full() const noexcept { return full_; }

 private:
  std::array<int, lane_count> in_flight_{};
  int all_ = 0;
  LaneSet full_;
};

}  // namespace tandem
