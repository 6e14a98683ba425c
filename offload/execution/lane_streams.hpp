#pragma once
// Streams of the device's lanes.
#include <array>
#include <cstddef>

#include "core/device/device.hpp"
#include "scheduler/tasks/task.hpp"
#include "scheduler/tasks/task_graph.hpp"

namespace tandem {

/// One thread at a time uses it, but for `wait_to_the_end`.
class LaneStreams {
 public:
  /// `device` and `graph` must outlive it. `peers`: whether there are other ranks, for whose lane there is a stream
  /// then.
  LaneStreams(Device& device, const TaskGraph& graph, bool peers);

  /// The stream on which a task of a lane is to be queued, behind those of the lane that went before.
  StreamView stream_for(TaskId id, Lane lane);
  /// Waits for what is queued on all of them. Where nothing moves for so long, that is told as a stall, `what` being
  /// waited for, and the wait goes on. What failed a stream is dropped.
  void wait_to_the_end(std::string_view what, double watchdog_seconds) noexcept;

 private:
  /// Streams of one lane: one, or two that take turns.
  struct OfLane {
    bool take_turns() const noexcept { return static_cast<bool>(StreamView(other)); }
    Stream now;
    Stream other;
    int in_a_row = 0;  ///< tasks that `now` has got
    TaskId last = no_task;
  };

  OfLane& of(Lane lane) noexcept { return lanes_[static_cast<std::size_t>(lane)]; }

  Device& device_;
  const TaskGraph& graph_;
  std::array<OfLane, lane_count> lanes_;  ///< empty where a lane has no stream
};

}  // namespace tandem
