#include "scheduler/simulation/step_lanes.hpp"

#include <algorithm>
#include <limits>

#include "core/base/error.hpp"
#include "scheduler/machine/fair_share.hpp"

namespace tandem {

bool StepLanes::issue() {
  bool moved = false;
  for (const Lane lane : device_lanes) {
    auto& queue = queues_[static_cast<std::size_t>(lane)];
    while (static_cast<int>(queue.size()) < queued_ahead(lane)) {
      const TaskId id = graph_.ready(lane);
      if (id == no_task) break;
      graph_.take(lane);
      queue.push_back(id);
      graph_.mark_issued(id);
      moved = true;
    }
  }
  return moved;
}

bool StepLanes::start_tasks() {
  bool moved = false;
  for (const Lane lane : device_lanes) {
    Flight& flight = of(lane);
    const auto& queue = queues_[static_cast<std::size_t>(lane)];
    if (flight.running || queue.empty()) continue;
    const Task& task = graph_.node(queue.front()).task;
    if (!graph_.dependencies_done(task.id)) continue;
    start(flight, task.id, tasks_.begin(task));
    moved = true;
  }
  for (const Lane lane : {Lane::cpu, Lane::disk, Lane::file_read, Lane::file_write}) {
    Flight& flight = of(lane);
    const TaskId id = graph_.ready(lane);
    if (flight.running || id == no_task) continue;
    graph_.take(lane);
    start(flight, id, tasks_.begin(graph_.node(id).task));
    moved = true;
  }
  return moved;
}

double StepLanes::pass_time(ResourceShares& use) {
  std::array<const TaskCost*, count + 1> costs{};
  std::array<double, count + 1> speeds{};
  std::array<std::size_t, count> lanes{};
  std::size_t running = 0;
  for (std::size_t lane = 0; lane < count; ++lane) {
    if (!flights_[lane].running) continue;
    costs[running] = &flights_[lane].cost;
    lanes[running++] = lane;
  }
  if (running == 0) throw MisuseError("the simulated plan does not go on", graph_.who_waits(layout_));
  std::size_t sharing = running;
  if (writing_) costs[sharing++] = &*writing_;
  fair_speeds(std::span(costs).first(sharing), std::span(speeds).first(sharing));
  double step = std::numeric_limits<double>::infinity();
  for (std::size_t i = 0; i < running; ++i) {
    step = std::min(step, flights_[lanes[i]].left * costs[i]->seconds / speeds[i]);
  }
  now_ += step;
  ended_count_ = 0;
  for (std::size_t i = 0; i < running; ++i) {
    Flight& flight = flights_[lanes[i]];
    const double seconds = costs[i]->seconds;
    const double rest = flight.left * seconds / speeds[i] - step;
    for (std::size_t r = 0; r < use.size(); ++r) use[r] += step * speeds[i] * costs[i]->share[r];
    // Flights that end together end at once, whatever rounding left of them.
    constexpr double rounding = 1e-12;
    flight.left = seconds > 0.0 ? rest * speeds[i] / seconds : 0.0;
    if (rest > rounding * now_) continue;
    flight.running = false;
    if (lanes[i] < lane_count && is_of_device(static_cast<Lane>(lanes[i]))) queues_[lanes[i]].pop_front();
    ended_[ended_count_++] = lanes[i];
  }
  return step;
}

void StepLanes::skip(double seconds) {
  now_ += seconds;
  for (Flight& flight : flights_) flight.begin += seconds;
}

}  // namespace tandem
