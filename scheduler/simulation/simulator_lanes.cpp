// The streams and workers of a simulated step, and its time.
#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "core/base/error.hpp"
#include "scheduler/machine/fair_share.hpp"
#include "scheduler/simulation/step_simulator.hpp"

namespace tandem {
namespace {

/// A layer's, not in pieces.
bool goes_whole(TaskKind kind) noexcept {
  return kind == TaskKind::fetch_weights || kind == TaskKind::gather_weights || kind == TaskKind::all_to_all_gradient;
}

}  // namespace

/// As the executor's issuer: ready tasks go to their streams, a few ahead of what runs.
bool Simulator::issue() {
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

void Simulator::start(Flight& flight, TaskId id, const TaskCost& cost) { flight = {id, cost, 1.0, now_, true}; }

/// That it stands for.
double Simulator::times(const Task& task) const {
  const auto index = static_cast<std::size_t>(task.id - first_id_);
  return index < times_.size() ? times_[index] : 1.0;
}

/// A coarse piece costs what its pieces would, each with its launch or latency.
TaskCost Simulator::cost_of(const Task& task) const {
  if (piece_ == 0 && !stand_for_several_) return costs_.of(task, sums_);
  const std::int64_t piece = takes_subgroup_whole(task) ? plan_.subgroup_size : piece_;
  const std::int64_t pieces = piece_ == 0 || goes_whole(task.kind) ? 1 : (task.count() + piece - 1) / piece;
  TaskCost cost = costs_.of(task, sums_, static_cast<double>(pieces));
  cost.seconds *= times(task);
  return cost;
}

/// Starts the head of each stream whose dependencies are done, and the readiest task of CPU, disk and file.
bool Simulator::start_heads() {
  bool moved = false;
  for (const Lane lane : device_lanes) {
    Flight& flight = flights_[static_cast<std::size_t>(lane)];
    const auto& queue = queues_[static_cast<std::size_t>(lane)];
    if (flight.running || queue.empty()) continue;
    const Task& task = graph_.node(queue.front()).task;
    if (!graph_.dependencies_done(task.id)) continue;
    start(flight, task.id, cost_of(task));
    moved = true;
  }
  for (const Lane lane : {Lane::cpu, Lane::disk, Lane::file_read, Lane::file_write}) {
    Flight& flight = flights_[static_cast<std::size_t>(lane)];
    const TaskId id = graph_.ready(lane);
    if (flight.running || id == no_task) continue;
    graph_.take(lane);
    start(flight, id, cost_of(graph_.node(id).task));
    moved = true;
  }
  Flight& caller = flights_[static_cast<std::size_t>(Lane::caller)];
  if (!caller.running && !computes_.empty() && may_run(computes_.front())) {
    const Compute& next = computes_.front();
    if (next.backward && backward_since_ < 0.0) backward_since_ = now_;
    if (next.opens_pass) open_pass();
    start(caller, no_task, costs_.compute(next.seconds));
    moved = true;
  }
  return start_input_copies() || moved;
}

/// On streams of the caller's own, beside the engine's.
bool Simulator::start_input_copies() {
  bool moved = false;
  for (const InputCopies::Way way : InputCopies::ways) {
    Flight& flight = flight_of(way);
    const double stands_for = inputs_.next(way);
    if (flight.running || stands_for == 0.0) continue;
    const auto bytes = static_cast<double>(plan_.offloaded_input_bytes);
    TaskCost cost = costs_.copy(bytes, way == InputCopies::Way::to_device);
    cost.seconds *= stands_for;
    start(flight, no_task, cost);
    moved = true;
  }
  return moved;
}

/// On the caller's stream.
void Simulator::open_pass() {
  if (options_.trace != nullptr || options_.each_micro_batch) return;
  if (openings_.size() == 3) openings_.erase(openings_.begin());
  openings_.push_back({now_, pending_, compute_seconds_, to_device_, to_host_, result_.use});
  if (const std::int64_t passes = passes_to_skip(); passes > 0) skip(passes);
}

/// All but the last, behind which there is no other. The caller's thread is somewhere in this pass or the next.
std::int64_t Simulator::passes_to_skip() const {
  const std::int64_t pass = action_ / static_cast<std::int64_t>(walk_.pass.size());
  return repeat(openings_) ? walk_.passes - 1 - pass - 1 : 0;
}

/// As if so many passes had gone by, each like the last.
void Simulator::skip(std::int64_t passes) {
  const auto times = static_cast<double>(passes);
  const Snapshot& from = openings_[1];
  const Snapshot to = openings_[2];
  const double seconds = times * (to.now - from.now);
  now_ += seconds;
  for (Flight& flight : flights_) flight.begin += seconds;
  const auto repeat = [times](double& sum, double before, double after) { sum += times * (after - before); };
  repeat(compute_seconds_, from.compute, to.compute);
  to_device_.repeat(times, from.to_device, to.to_device);
  to_host_.repeat(times, from.to_host, to.to_host);
  for (std::size_t r = 0; r < result_.use.size(); ++r) repeat(result_.use[r], from.use[r], to.use[r]);
  action_ += passes * static_cast<std::int64_t>(walk_.pass.size());
  compute_left_ -= times * seconds_of(walk_.pass);
  lowering_.leave_out(static_cast<int>(passes) * walked_.at_once);
  openings_.clear();
}

void Simulator::pass_time() {
  std::array<const TaskCost*, std::tuple_size_v<decltype(flights_)> + 1> costs{};
  std::array<double, costs.size()> speeds{};
  std::array<std::size_t, costs.size()> lanes{};
  std::size_t count = 0;
  for (std::size_t lane = 0; lane < flights_.size(); ++lane) {
    if (!flights_[lane].running) continue;
    costs[count] = &flights_[lane].cost;
    lanes[count++] = lane;
  }
  if (count == 0) throw MisuseError("the simulated plan does not go on", graph_.who_waits(layout_));
  std::size_t sharing = count;
  if (writing_) costs[sharing++] = &*writing_;
  fair_speeds(std::span(costs).first(sharing), std::span(speeds).first(sharing));
  double step = std::numeric_limits<double>::infinity();
  for (std::size_t i = 0; i < count; ++i) {
    step = std::min(step, flights_[lanes[i]].left * costs[i]->seconds / speeds[i]);
  }
  now_ += step;
  const bool computes = flights_[static_cast<std::size_t>(Lane::caller)].running;
  if (!computes && updates_left_ > 0 && backward_since_ < 0.0) result_.exposed_update_seconds += step;
  for (std::size_t i = 0; i < count; ++i) {
    Flight& flight = flights_[lanes[i]];
    const double seconds = costs[i]->seconds;
    const double rest = flight.left * seconds / speeds[i] - step;
    for (std::size_t r = 0; r < result_.use.size(); ++r) result_.use[r] += step * speeds[i] * costs[i]->share[r];
    // Those that end together end at once, whatever rounding left of them.
    constexpr double rounding = 1e-12;
    flight.left = seconds > 0.0 ? rest * speeds[i] / seconds : 0.0;
    if (rest > rounding * now_) continue;
    lanes[i] < lane_count ? finish(static_cast<Lane>(lanes[i]))
                          : finish_input_copy(static_cast<InputCopies::Way>(lanes[i] - lane_count));
  }
}

void Simulator::done(TaskId id) {
  --pending_;
  graph_.mark_done(id);
}

void Simulator::finish(Lane lane) {
  Flight& flight = flights_[static_cast<std::size_t>(lane)];
  flight.running = false;
  if (lane == Lane::caller) return finish_compute();
  const Task& task = graph_.node(flight.id).task;
  if (options_.trace != nullptr) {
    options_.trace->span(name_of(lane), task.text(layout_.layer(task.layer).name), flight.begin, now_, task.bytes);
  }
  if (is_update(task.kind) && --updates_left_ == 0) update_end_ = now_;
  account(task, now_ - flight.begin);
  if (lane == Lane::disk) --saves_left_;
  if (is_of_device(lane)) queues_[static_cast<std::size_t>(lane)].pop_front();
  done(flight.id);
}

void Simulator::account(const Task& task, double seconds) {
  const double bytes = times(task) * static_cast<double>(task.bytes);
  if (task.lane == Lane::host_to_device) to_device_.add(seconds, bytes);
  if (task.lane == Lane::device_to_host) to_host_.add(seconds, bytes);
  if (task.kind == TaskKind::update_cpu) cpu_update_.add(seconds, static_cast<double>(task.count()));
}

void Simulator::finish_compute() {
  compute_seconds_ += now_ - flights_[static_cast<std::size_t>(Lane::caller)].begin;
  const Compute ended = std::move(computes_.front());
  computes_.pop_front();
  compute_left_ -= ended.seconds;
  inputs_.ran(ended.inputs);
  if (options_.trace != nullptr) {
    options_.trace->span(name_of(Lane::caller),
                         fmt::format("{} {}", ended.backward ? "backward" : "forward", layout_.layer(ended.layer).name),
                         flights_[static_cast<std::size_t>(Lane::caller)].begin, now_);
  }
  for (const TaskId id : ended.ends) done(id);
}

void Simulator::finish_input_copy(InputCopies::Way way) {
  flight_of(way).running = false;
  inputs_.copied(way);
  if (options_.trace == nullptr) return;
  options_.trace->span(way == InputCopies::Way::to_host ? "activations to host" : "activations to device", "input",
                       flight_of(way).begin, now_, plan_.offloaded_input_bytes);
}

}  // namespace tandem
