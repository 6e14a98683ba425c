#pragma once
// Streams and workers of a simulated step: what runs on each, and how time passes for all of them.
#include <array>
#include <cstddef>
#include <deque>
#include <optional>
#include <span>

#include "core/params/parameter_layout.hpp"
#include "scheduler/simulation/input_copies.hpp"
#include "scheduler/simulation/step_tasks.hpp"

namespace tandem {

/// Something that runs on a lane.
struct Flight {
  TaskId id = no_task;  ///< none of the caller's work and copies
  TaskCost cost;
  double left = 0.0;  ///< share of the work still to do
  double begin = 0.0;
  bool running = false;
};

/// The lanes of tasks, and behind them those of the caller's copies of inputs.
class StepLanes {
 public:
  /// `tasks` and `layout` must outlive it. `writing`: what goes on beside all of them, without an end.
  StepLanes(const ParameterLayout& layout, StepTasks& tasks, const std::optional<TaskCost>& writing)
      : layout_(layout), tasks_(tasks), graph_(tasks.graph()), writing_(writing) {}

  double now() const noexcept { return now_; }  ///< virtual seconds
  Flight& of(Lane lane) noexcept { return flights_[static_cast<std::size_t>(lane)]; }
  const Flight& of(Lane lane) const noexcept { return flights_[static_cast<std::size_t>(lane)]; }
  Flight& of(InputCopies::Way way) noexcept { return flights_[lane_count + static_cast<std::size_t>(way)]; }

  /// Queues ready tasks on their streams as the executor's issuer does, a few ahead of the running ones. Returns
  /// whether it queued some.
  bool issue();
  /// Starts the head of each stream whose dependencies are done, and the readiest task of CPU, disk and file. Returns
  /// whether some were.
  bool start_tasks();
  void start(Flight& flight, TaskId id, const TaskCost& cost) { flight = {id, cost, 1.0, now_, true}; }
  /// Passes time until the first of what runs has ended. Adds what is used meanwhile. Returns the seconds that passed.
  /// Throws MisuseError where nothing runs.
  double pass_time(ResourceShares& use);
  /// Calls task(lane) or copy(way) for all that ended then.
  template <class OfTask, class OfCopy>
  void for_ended(OfTask task, OfCopy copy) const {
    for (const std::size_t lane : std::span(ended_).first(ended_count_)) {
      lane < lane_count ? task(static_cast<Lane>(lane)) : copy(static_cast<InputCopies::Way>(lane - lane_count));
    }
  }
  /// Skips seconds, as if the running flights had begun, ended, and begun again in them.
  void skip(double seconds);

 private:
  static constexpr std::size_t count = lane_count + InputCopies::ways.size();

  const ParameterLayout& layout_;
  StepTasks& tasks_;
  TaskGraph& graph_;
  const std::optional<TaskCost> writing_;
  std::array<std::deque<TaskId>, lane_count> queues_;  ///< issued to streams, the running one first
  std::array<Flight, count> flights_;                  ///< flights by lane, then those of inputs by way
  std::array<std::size_t, count> ended_{};
  std::size_t ended_count_ = 0;
  double now_ = 0.0;
};

}  // namespace tandem
