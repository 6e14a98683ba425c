#include "scheduler/simulator.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <limits>
#include <optional>
#include <string>
#include <utility>

#include "core/error.hpp"
#include "scheduler/fair_share.hpp"
#include "scheduler/lumps.hpp"
#include "scheduler/moment.hpp"
#include "scheduler/task_graph.hpp"
#include "scheduler/unfold.hpp"
#include "scheduler/walk.hpp"

namespace tandem {
namespace {

constexpr double unlimited = std::numeric_limits<double>::infinity();

class Simulator {
 public:
  /// `plan` has the micro-batches of `walked`, which stand for those of `whole`. `piece`: elements that the plan's
  /// pieces are lumps of; 0: they are not.
  Simulator(const ParameterLayout& layout, const Plan& plan, const MachineProfile& profile,
            std::span<const LayerSeconds> compute, const SimulationOptions& options, const Accumulation& walked,
            const Accumulation& whole, std::int64_t piece)
      : layout_(layout),
        plan_(plan),
        costs_(profile, plan.state, plan.update_threads),
        compute_(compute),
        options_(options),
        unfolder_(layout, plan),
        walked_(walked),
        sums_(whole.micro_batches > 1),
        stand_for_several_(walked.micro_batches < whole.micro_batches),
        piece_(piece),
        walk_(walk_of(layout.layer_count(), walked, whole)) {
    compute_left_ = static_cast<double>(walk_.passes - 1) * seconds_of(walk_.pass) + seconds_of(walk_.last);
    if (options.disk_share > 0.0) writing_ = costs_.writing(options.disk_share);
  }

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
    bool opens_pass = false;
    double seconds = 0.0;
  };

  TaskId warm_up();
  void update();
  void begin_step();
  bool gradients_complete() const;
  void submit(const Action& stands_for = {});
  bool advance_caller();
  bool act(const Action& action);
  double seconds_of(const Action& action) const;
  double seconds_of(std::span<const Action> actions) const;
  void queue_compute(const Action& action, bool backward);
  void end_with_last_compute(TaskId id);
  bool may_begin(TaskId id);
  bool may_run(const Compute& compute) const;
  bool issue();
  bool start_heads();
  double times(const Task& task) const;
  TaskCost cost_of(const Task& task) const;
  double least_seconds() const;
  bool gives_up();
  void bound_by_updates();
  void start(Flight& flight, TaskId id, const TaskCost& cost);
  void pass_time();
  void open_pass();
  std::int64_t passes_to_skip() const;
  void skip(std::int64_t passes);
  void done(TaskId id);
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
  const Accumulation walked_;
  const bool sums_;               ///< a step has several micro-batches
  const bool stand_for_several_;  ///< some micro-batches do
  const std::int64_t piece_;      ///< elements of what lumps are made of; 0: nothing is in lumps
  const Walk walk_;

  TaskGraph graph_;
  TaskList tasks_;
  TaskId first_id_ = 0;
  std::vector<double> times_;                          ///< by task, where micro-batches are lumped: that it stands for
  std::array<std::deque<TaskId>, lane_count> queues_;  ///< issued to streams, the running one first
  std::array<Flight, lane_count> flights_;
  std::optional<TaskCost> writing_;  ///< beside all of them, without an end
  std::deque<Compute> computes_;

  std::int64_t action_ = 0;
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
  double least_ = 0.0;         ///< a step takes at least as long, its overhead left out
  double compute_left_ = 0.0;  ///< of the caller's stream, alone
  std::int64_t pending_ = 0;   ///< tasks that are not done
  Done to_device_, to_host_, cpu_update_;
  std::vector<Moment> openings_;  ///< when the last three passes of this step began on the caller's stream
  Simulation result_;
};

/// Walks a step of one micro-batch without time, so that buffers hold what they do in the steady state: no more is left
/// of a step whose tasks are done. Returns the id of the next task.
TaskId Simulator::warm_up() {
  TaskList tasks;
  unfolder_.begin_step(1);
  unfolder_.prefetch(tasks);
  const Walk step = walk_of(layout_.layer_count(), {}, {});
  for (const Action& action : step.last) {
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
  first_id_ = warm_up();
  graph_ = TaskGraph(first_id_);
  update();
  if (gives_up()) return result_;
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
    if (gives_up()) return result_;
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
  if (options_.give_up_after < unlimited) bound_by_updates();
  submit();
}

/// A layer's forward waits for the updates of all before it and its own, which take at least as long as what they use
/// most.
void Simulator::bound_by_updates() {
  ResourceShares busy{};
  double cpu = 0.0;
  double ahead = 0.0;  // forward of the layers before
  int layer = 0;
  const auto bound = [&] {
    const double updated = std::max(cpu, *std::max_element(busy.begin(), busy.end()));
    least_ = std::max(least_, updated + compute_left_ - ahead);
  };
  for (const Task& task : tasks_) {
    if (task.kind == TaskKind::store_state) continue;  // for which nobody waits
    for (; layer < task.layer; ++layer) {
      bound();
      ahead += compute_[static_cast<std::size_t>(layer)].forward;
    }
    const TaskCost cost = cost_of(task);
    for (std::size_t r = 0; r < busy.size(); ++r) busy[r] += cost.seconds * cost.share[r];
    if (task.lane == Lane::cpu) cpu += cost.seconds;
  }
  bound();
}

/// What the engine waits for at the end of a step.
bool Simulator::gradients_complete() const {
  const std::vector<TaskId>& norms = unfolder_.norm_tasks();
  return action_ == walk_.size() && computes_.empty() &&
         std::all_of(norms.begin(), norms.end(), [&](TaskId id) { return graph_.done(id); });
}

void Simulator::begin_step() {
  openings_.clear();
  unfolder_.begin_step(walked_.micro_batches);
  unfolder_.prefetch(tasks_);
  submit();
}

/// What an action has emitted, or an update.
void Simulator::submit(const Action& stands_for) {
  result_.tasks += static_cast<std::int64_t>(tasks_.size());
  pending_ += static_cast<std::int64_t>(tasks_.size());
  for (std::size_t i = 0; i < tasks_.size(); ++i) graph_.add(tasks_[i], tasks_.dependencies(i));
  if (stand_for_several_) {
    for (const Task& task : tasks_) {
      times_.push_back(task.kind == TaskKind::fetch_weights ? 1.0 : stands_for.micro_batches);
    }
  }
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
  switch (action.kind) {
    case Action::Kind::fetch:
      visit_ = unfolder_.visit(action.layer, tasks_);
      unfolder_.prefetch(tasks_);
      submit(action);
      return may_begin(visit_.id);
    case Action::Kind::gradients:
      gradients_ = unfolder_.gradients(action.layer, tasks_);
      submit(action);
      for (const GradientPlace& place : gradients_.gradients) {
        if (!place.fresh) continue;
        const auto elements = static_cast<double>(layout_.layer(place.layer).state_elements);
        zero_seconds_ += action.micro_batches * costs_.zero_seconds(elements * sizeof(float));
      }
      return may_begin(gradients_.id);
    case Action::Kind::compute_forward:
      queue_compute(action, false);
      return true;
    case Action::Kind::compute_backward:
      queue_compute(action, true);
      return true;
    case Action::Kind::release:
      unfolder_.release(visit_);
      end_with_last_compute(visit_.id);
      unfolder_.prefetch(tasks_);
      submit(action);
      return true;
    case Action::Kind::commit:
      unfolder_.commit(gradients_, tasks_);
      submit(action);
      end_with_last_compute(gradients_.id);
      return true;
  }
  return true;
}

/// Of the caller's stream, what it zeroes left out.
double Simulator::seconds_of(const Action& action) const {
  const LayerSeconds& seconds = compute_[static_cast<std::size_t>(action.layer)];
  if (action.kind == Action::Kind::compute_forward) return action.micro_batches * seconds.forward;
  return action.kind == Action::Kind::compute_backward ? action.micro_batches * seconds.backward : 0.0;
}

double Simulator::seconds_of(std::span<const Action> actions) const {
  double seconds = 0.0;
  for (const Action& action : actions) seconds += seconds_of(action);
  return seconds;
}

void Simulator::queue_compute(const Action& action, bool backward) {
  compute_left_ += zero_seconds_;
  computes_.push_back(
      {std::exchange(begun_, {}), {}, action.layer, backward, action.opens_pass, seconds_of(action) + zero_seconds_});
  zero_seconds_ = 0.0;
}

bool Simulator::gives_up() {
  if (least_seconds() <= options_.give_up_after) return false;
  result_.given_up = true;
  result_.step_seconds = least_seconds();
  return true;
}

/// The step takes at least as long: its stream can be no faster than alone.
double Simulator::least_seconds() const {
  const Flight& caller = flights_[static_cast<std::size_t>(Lane::caller)];
  const double done = caller.running ? (1.0 - caller.left) * caller.cost.seconds : 0.0;
  return std::max(least_, now_ + compute_left_ - done) + costs_.step_overhead();
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

/// That it stands for.
double Simulator::times(const Task& task) const {
  const auto index = static_cast<std::size_t>(task.id - first_id_);
  return index < times_.size() ? times_[index] : 1.0;
}

/// A lump costs what its pieces would, each with its launch or latency.
TaskCost Simulator::cost_of(const Task& task) const {
  if (piece_ == 0 && !stand_for_several_) return costs_.of(task, sums_);
  const bool by_subgroup = task.kind == TaskKind::push_weights || task.kind == TaskKind::update_cpu;
  const std::int64_t piece = by_subgroup ? plan_.subgroup_size : piece_;
  const std::int64_t pieces =
      piece_ == 0 || task.kind == TaskKind::fetch_weights ? 1 : (task.count() + piece - 1) / piece;
  TaskCost cost = costs_.of(task, sums_, static_cast<double>(pieces));
  cost.seconds *= times(task);
  return cost;
}

/// Starts the head of each stream whose dependencies are done, and the readiest task of CPU and disk.
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
  for (const Lane lane : {Lane::cpu, Lane::disk}) {
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
  return moved;
}

/// On the caller's stream.
void Simulator::open_pass() {
  if (options_.trace != nullptr || options_.each_micro_batch) return;
  if (openings_.size() == 3) openings_.erase(openings_.begin());
  openings_.push_back(
      {now_, pending_, compute_seconds_, result_.exposed_update_seconds, to_device_, to_host_, result_.use});
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
  const Moment& from = openings_[1];
  const Moment to = openings_[2];
  const double seconds = times * (to.now - from.now);
  now_ += seconds;
  blocked_since_ += seconds;
  for (Flight& flight : flights_) flight.begin += seconds;
  const auto repeat = [times](double& sum, double before, double after) { sum += times * (after - before); };
  repeat(compute_seconds_, from.compute, to.compute);
  repeat(result_.exposed_update_seconds, from.exposed_update, to.exposed_update);
  to_device_.repeat(times, from.to_device, to.to_device);
  to_host_.repeat(times, from.to_host, to.to_host);
  for (std::size_t r = 0; r < result_.use.size(); ++r) repeat(result_.use[r], from.use[r], to.use[r]);
  action_ += passes * static_cast<std::int64_t>(walk_.pass.size());
  compute_left_ -= times * seconds_of(walk_.pass);
  unfolder_.leave_out(static_cast<int>(passes) * walked_.at_once);
  openings_.clear();
}

void Simulator::pass_time() {
  std::array<const TaskCost*, lane_count + 1> costs{};
  std::array<double, lane_count + 1> speeds{};
  std::array<std::size_t, lane_count> lanes{};
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
  if (options_.trace != nullptr) {
    options_.trace->span(name_of(Lane::caller),
                         fmt::format("{} {}", ended.backward ? "backward" : "forward", layout_.layer(ended.layer).name),
                         flights_[static_cast<std::size_t>(Lane::caller)].begin, now_);
  }
  for (const TaskId id : ended.ends) done(id);
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
  const Accumulation whole{options.micro_batches, std::min(plan.micro_batches_at_once, options.micro_batches)};
  const bool each = options.trace != nullptr || options.each_micro_batch;
  const int most = options.measured_rates ? micro_batches_of_rates : fewest_micro_batches;
  const Accumulation walked = each ? whole : in_lumps(whole, most);
  Plan simulated = plan;
  simulated.max_micro_batches = walked.micro_batches;
  simulated.micro_batches_at_once = walked.at_once;
  if (options.lumps == 0) return Simulator(layout, simulated, profile, compute, options, walked, whole, 0).run();
  simulated = in_lumps(layout, std::move(simulated), options.lumps);
  return Simulator(layout, simulated, profile, compute, options, walked, whole, plan.piece_elements).run();
}

}  // namespace tandem
