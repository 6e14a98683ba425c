#include "scheduler/simulator.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <limits>
#include <string>
#include <utility>

#include "core/error.hpp"
#include "scheduler/fair_share.hpp"
#include "scheduler/task_graph.hpp"
#include "scheduler/unfold.hpp"

namespace tandem {
namespace {

/// What the caller's thread does, one after another.
struct Action {
  enum class Kind : std::uint8_t { fetch, compute_forward, gradients, compute_backward, release, commit };
  Kind kind;
  int layer;
};

/// Forward and backward of tandem's models with `micro_batches` through each layer at once, behind `walk`. A layer alone
/// in its layout is both first and last.
void walk_through(int layers, int micro_batches, std::vector<Action>& walk) {
  using K = Action::Kind;
  const auto add = [&](int layer, std::initializer_list<K> kinds) {
    for (const K kind : kinds) walk.push_back({kind, layer});
  };
  const auto add_each = [&](int layer, std::initializer_list<K> kinds) {
    for (int micro = 0; micro < micro_batches; ++micro) {
      add(layer, kinds);
      if (micro + 1 < micro_batches) add(layer, {K::commit});
    }
  };
  for (int l = 0; l + 1 < layers; ++l) {
    add(l, {K::fetch});
    for (int micro = 0; micro < micro_batches; ++micro) add(l, {K::compute_forward});
    add(l, {K::release});
  }
  add(layers - 1, {K::fetch});
  add_each(layers - 1, {K::compute_forward, K::gradients, K::compute_backward});
  add(layers - 1, {K::release, K::commit});
  for (int l = layers - 2; l > 0; --l) {
    add(l, {K::fetch});
    add_each(l, {K::gradients, K::compute_backward});
    add(l, {K::release, K::commit});
  }
  if (layers == 1) return;
  add_each(0, {K::gradients, K::compute_backward});
  add(0, {K::commit});
}

/// A step.
std::vector<Action> walk_of(int layers, int micro_batches, int at_once) {
  std::vector<Action> walk;
  for (int first = 0; first < micro_batches; first += at_once) {
    walk_through(layers, std::min(at_once, micro_batches - first), walk);
  }
  return walk;
}

class Simulator {
 public:
  Simulator(const ParameterLayout& layout, const Plan& plan, const MachineProfile& profile,
            std::span<const LayerSeconds> compute, const SimulationOptions& options)
      : layout_(layout),
        plan_(plan),
        costs_(profile, plan.state),
        compute_(compute),
        options_(options),
        unfolder_(layout, plan),
        walk_(walk_of(layout.layer_count(), options.micro_batches, plan.micro_batches_at_once)) {}

  Simulation run();

 private:
  /// Something in flight: the head of a lane.
  struct Flight {
    TaskId id = no_task;
    TaskCost cost;
    double left = 0.0;  ///< share of the work still to do
    double begin = 0.0;
    bool running = false;
  };
  /// One piece of the caller's work on its stream.
  struct Compute {
    std::vector<TaskId> begins;  ///< the caller's tasks whose dependencies its stream waits for
    std::vector<TaskId> ends;    ///< ... that are done with it
    int layer = 0;
    bool backward = false;
    double seconds = 0.0;
  };

  TaskId warm_up();
  void update();
  void begin_step();
  bool gradients_complete() const;
  void submit();
  bool advance_caller();
  bool act(const Action& action);
  void queue_compute(int layer, bool backward, double seconds);
  void end_with_last_compute(TaskId id);
  bool may_begin(TaskId id);
  bool may_run(const Compute& compute) const;
  bool issue();
  bool start_heads();
  void start(Flight& flight, TaskId id, const TaskCost& cost);
  void pass_time();
  void finish(Lane lane);
  void finish_compute();
  void account(const Task& task, double seconds);
  bool finished() const { return action_ == walk_.size() && graph_.empty() && computes_.empty(); }

  const ParameterLayout& layout_;
  const Plan& plan_;
  const CostModel costs_;
  std::span<const LayerSeconds> compute_;
  const SimulationOptions& options_;
  Unfolder unfolder_;
  const std::vector<Action> walk_;

  TaskGraph graph_;
  TaskList tasks_;
  std::array<std::deque<TaskId>, lane_count> queues_;  ///< issued to streams, the running one first
  std::array<Flight, lane_count> flights_;
  std::deque<Compute> computes_;

  std::size_t action_ = 0;
  bool blocked_ = false;  ///< in the middle of `walk_[action_]`
  double blocked_since_ = 0.0;
  TaskId begins_ = no_task;    ///< the caller's task that its thread wants to begin
  std::vector<TaskId> begun_;  ///< ... that it has begun since its last compute
  double zero_seconds_ = 0.0;  ///< of fresh gradient buffers, before the next compute
  Visit visit_;
  GradientVisit gradients_;

  double now_ = 0.0;
  double update_end_ = 0.0;
  bool save_begun_ = false;
  std::int64_t saves_left_ = 0;
  double backward_since_ = -1.0;
  std::int64_t updates_left_ = 0;
  double compute_seconds_ = 0.0;
  struct Done {
    double seconds = 0.0;
    double amount = 0.0;  ///< bytes or parameters
    double rate() const { return seconds > 0.0 ? amount / seconds : 0.0; }
  };
  Done to_device_, to_host_, cpu_update_;
  Simulation result_;
};

/// Walks one step without time, so that buffers and histories are those of the steady state. Returns the id
/// of the next task.
TaskId Simulator::warm_up() {
  TaskList tasks;
  unfolder_.begin_step(options_.micro_batches);
  unfolder_.prefetch(tasks);
  for (const Action& action : walk_) {
    switch (action.kind) {
      case Action::Kind::fetch:
        visit_ = unfolder_.visit(action.layer, tasks);
        unfolder_.prefetch(tasks);
        break;
      case Action::Kind::gradients:
        gradients_ = unfolder_.gradients(action.layer, tasks);
        break;
      case Action::Kind::release:
        unfolder_.release(visit_);
        unfolder_.prefetch(tasks);
        break;
      case Action::Kind::commit:
        unfolder_.commit(gradients_, tasks);
        break;
      case Action::Kind::compute_forward:
      case Action::Kind::compute_backward:
        break;
    }
  }
  // Ids count up from 0, one for each task.
  const auto next = static_cast<TaskId>(tasks.size());
  unfolder_.forget_before(next);
  return next;
}

Simulation Simulator::run() {
  graph_ = TaskGraph(warm_up());
  update();
  if (options_.overlap_updates) begin_step();
  bool begun = options_.overlap_updates;
  while (true) {
    if (!begun && graph_.empty()) {
      begun = true;
      begin_step();
    }
    bool changed = true;
    while (changed) {
      changed = begun && advance_caller();
      changed = issue() || changed;
      changed = start_heads() || changed;
    }
    if (begun && finished()) break;
    if (begun && saves_left_ > 0 && gradients_complete()) {
      ++result_.steps;
      action_ = 0;
      update();
      begun = options_.overlap_updates;
      if (begun) begin_step();
      continue;
    }
    if (begun || !graph_.empty()) pass_time();
  }
  result_.backward_seconds = backward_since_ < 0.0 ? 0.0 : now_ - backward_since_;
  result_.forward_seconds = now_ - result_.backward_seconds;
  result_.update_seconds = update_end_;
  for (double& use : result_.use) use = now_ > 0.0 ? use / now_ : 0.0;
  result_.step_seconds = now_ / result_.steps + costs_.step_overhead();
  result_.rates = {compute_seconds_, to_device_.rate(), to_host_.rate(), cpu_update_.rate()};
  return result_;
}

/// The end of a step: its updates, and the save that is to begin with the first.
void Simulator::update() {
  unfolder_.update(tasks_);
  updates_left_ += static_cast<std::int64_t>(tasks_.size());
  if (options_.save && !std::exchange(save_begun_, true)) {
    const std::size_t before = tasks_.size();
    unfolder_.save(tasks_);
    saves_left_ = static_cast<std::int64_t>(tasks_.size() - before);
  }
  unfolder_.end_pass();
  submit();
}

/// What the engine waits for at the end of a step.
bool Simulator::gradients_complete() const {
  const std::vector<TaskId>& norms = unfolder_.norm_tasks();
  return action_ == walk_.size() && computes_.empty() &&
         std::all_of(norms.begin(), norms.end(), [&](TaskId id) { return graph_.done(id); });
}

void Simulator::begin_step() {
  unfolder_.begin_step(options_.micro_batches);
  unfolder_.prefetch(tasks_);
  submit();
}

void Simulator::submit() {
  result_.tasks += static_cast<std::int64_t>(tasks_.size());
  for (std::size_t i = 0; i < tasks_.size(); ++i) graph_.add(tasks_[i], tasks_.dependencies(i));
  tasks_.clear();
}

// -- the caller --------------------------------------------------------------------------------------------

/// The caller's thread costs no time of its own: it goes on until it has to wait.
bool Simulator::advance_caller() {
  bool moved = false;
  while (action_ < walk_.size()) {
    if (!blocked_ && !act(walk_[action_])) {
      blocked_ = true;
      blocked_since_ = now_;
    }
    if (blocked_) {
      if (graph_.node(begins_).waiting_for > 0) return moved;
      if (walk_[action_].kind == Action::Kind::fetch) result_.exposed_update_seconds += now_ - blocked_since_;
      blocked_ = false;
    }
    ++action_;
    moved = true;
  }
  return moved;
}

/// Returns whether the caller may go on at once.
bool Simulator::act(const Action& action) {
  const LayerSeconds& seconds = compute_[static_cast<std::size_t>(action.layer)];
  switch (action.kind) {
    case Action::Kind::fetch:
      visit_ = unfolder_.visit(action.layer, tasks_);
      unfolder_.prefetch(tasks_);
      submit();
      return may_begin(visit_.id);
    case Action::Kind::gradients:
      gradients_ = unfolder_.gradients(action.layer, tasks_);
      submit();
      for (const GradientPlace& place : gradients_.gradients) {
        if (!place.fresh) continue;
        const auto elements = static_cast<double>(layout_.layer(place.layer).state_elements);
        zero_seconds_ += costs_.zero_seconds(elements * sizeof(float));
      }
      return may_begin(gradients_.id);
    case Action::Kind::compute_forward:
      queue_compute(action.layer, false, seconds.forward);
      return true;
    case Action::Kind::compute_backward:
      queue_compute(action.layer, true, seconds.backward);
      return true;
    case Action::Kind::release:
      unfolder_.release(visit_);
      end_with_last_compute(visit_.id);
      unfolder_.prefetch(tasks_);
      submit();
      return true;
    case Action::Kind::commit:
      unfolder_.commit(gradients_, tasks_);
      submit();
      end_with_last_compute(gradients_.id);
      return true;
  }
  return true;
}

void Simulator::queue_compute(int layer, bool backward, double seconds) {
  computes_.push_back({std::exchange(begun_, {}), {}, layer, backward, seconds + zero_seconds_});
  zero_seconds_ = 0.0;
}

/// The caller's thread has queued all work of its task: issued, and done when its stream gets there.
void Simulator::end_with_last_compute(TaskId id) {
  computes_.back().ends.push_back(id);
  graph_.mark_issued(id);
}

/// Its stream will wait until what the task depends on is done; the thread only until it is issued.
bool Simulator::may_begin(TaskId id) {
  begins_ = id;
  begun_.push_back(id);
  return graph_.node(id).waiting_for == 0;
}

bool Simulator::may_run(const Compute& compute) const {
  return std::all_of(compute.begins.begin(), compute.begins.end(),
                     [&](TaskId id) { return graph_.dependencies_done(id); });
}

// -- lanes -----------------------------------------------------------------------------------------------

/// As the executor's issuer: ready tasks go to their streams, a few ahead of what runs.
bool Simulator::issue() {
  bool moved = false;
  for (const Lane lane : device_lanes) {
    auto& queue = queues_[static_cast<std::size_t>(lane)];
    while (static_cast<int>(queue.size()) < queued_ahead) {
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

/// Starts the head of each stream whose dependencies are done, and the readiest task of CPU and disk.
bool Simulator::start_heads() {
  bool moved = false;
  const bool sums = options_.micro_batches > 1;
  for (const Lane lane : device_lanes) {
    Flight& flight = flights_[static_cast<std::size_t>(lane)];
    const auto& queue = queues_[static_cast<std::size_t>(lane)];
    if (flight.running || queue.empty()) continue;
    const Task& task = graph_.node(queue.front()).task;
    if (!graph_.dependencies_done(task.id)) continue;
    start(flight, task.id, costs_.of(task, sums));
    moved = true;
  }
  for (const Lane lane : {Lane::cpu, Lane::disk}) {
    Flight& flight = flights_[static_cast<std::size_t>(lane)];
    const TaskId id = graph_.ready(lane);
    if (flight.running || id == no_task) continue;
    graph_.take(lane);
    start(flight, id, costs_.of(graph_.node(id).task, sums));
    moved = true;
  }
  Flight& caller = flights_[static_cast<std::size_t>(Lane::caller)];
  if (!caller.running && !computes_.empty() && may_run(computes_.front())) {
    const Compute& next = computes_.front();
    if (next.backward && backward_since_ < 0.0) backward_since_ = now_;
    start(caller, no_task, costs_.compute(next.seconds));
    moved = true;
  }
  return moved;
}

void Simulator::pass_time() {
  std::array<const TaskCost*, lane_count> costs{};
  std::array<double, lane_count> speeds{};
  std::array<std::size_t, lane_count> lanes{};
  std::size_t count = 0;
  for (std::size_t lane = 0; lane < flights_.size(); ++lane) {
    if (!flights_[lane].running) continue;
    costs[count] = &flights_[lane].cost;
    lanes[count++] = lane;
  }
  if (count == 0) throw MisuseError("the simulated plan does not go on", graph_.who_waits(layout_));
  fair_speeds(std::span(costs).first(count), std::span(speeds).first(count));
  double step = std::numeric_limits<double>::infinity();
  for (std::size_t i = 0; i < count; ++i) {
    step = std::min(step, flights_[lanes[i]].left * costs[i]->seconds / speeds[i]);
  }
  now_ += step;
  for (std::size_t i = 0; i < count; ++i) {
    Flight& flight = flights_[lanes[i]];
    const double seconds = costs[i]->seconds;
    const double rest = flight.left * seconds / speeds[i] - step;
    for (std::size_t r = 0; r < result_.use.size(); ++r) result_.use[r] += step * speeds[i] * costs[i]->share[r];
    // Those that end together end at once, whatever rounding left of them.
    constexpr double rounding = 1e-12;
    flight.left = seconds > 0.0 ? rest * speeds[i] / seconds : 0.0;
    if (rest <= rounding * now_) finish(static_cast<Lane>(lanes[i]));
  }
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
  graph_.mark_done(flight.id);
}

void Simulator::account(const Task& task, double seconds) {
  const auto add = [seconds](Done& done, double amount) {
    done.seconds += seconds;
    done.amount += amount;
  };
  if (task.lane == Lane::host_to_device) add(to_device_, static_cast<double>(task.bytes));
  if (task.lane == Lane::device_to_host) add(to_host_, static_cast<double>(task.bytes));
  if (task.kind == TaskKind::update_cpu) add(cpu_update_, static_cast<double>(task.count()));
}

void Simulator::finish_compute() {
  compute_seconds_ += now_ - flights_[static_cast<std::size_t>(Lane::caller)].begin;
  const Compute done = std::move(computes_.front());
  computes_.pop_front();
  if (options_.trace != nullptr) {
    options_.trace->span(name_of(Lane::caller),
                         fmt::format("{} {}", done.backward ? "backward" : "forward", layout_.layer(done.layer).name),
                         flights_[static_cast<std::size_t>(Lane::caller)].begin, now_);
  }
  for (const TaskId id : done.ends) graph_.mark_done(id);
}

}  // namespace

Resource Simulation::bound_by() const noexcept {
  return static_cast<Resource>(std::max_element(use.begin(), use.end()) - use.begin());
}

Simulation simulate(const ParameterLayout& layout, const Plan& plan, const MachineProfile& profile,
                    std::span<const LayerSeconds> compute, const SimulationOptions& options) {
  if (plan.layers.size() != layout.layers().size() || compute.size() != plan.layers.size()) {
    throw MisuseError("simulation of a plan of another layout");
  }
  if (options.micro_batches < 1 || options.micro_batches > plan.max_micro_batches) {
    throw MisuseError(fmt::format("simulation of {} micro-batches", options.micro_batches),
                      fmt::format("the plan allows 1 to {}", plan.max_micro_batches));
  }
  return Simulator(layout, plan, profile, compute, options).run();
}

}  // namespace tandem
