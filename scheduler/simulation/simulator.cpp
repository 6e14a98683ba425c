#include "scheduler/simulation/simulator.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "core/base/error.hpp"
#include "scheduler/simulation/coarsening.hpp"
#include "scheduler/simulation/step_simulator.hpp"

namespace tandem {

/// Walks a step of one micro-batch without time, so that buffers hold what they do in the steady state: no more is left
/// of a step whose tasks are done. Returns the id of the next task.
TaskId Simulator::warm_up() {
  TaskId next = 0;
  tasks_.clear();
  lowering_.begin_step(1);
  lowering_.prefetch(tasks_);
  const bool alone = walked_.micro_batches == 1;
  const Walk step = alone ? walk_ : walk_of(layout_.layer_count(), {}, {}, plan_.owners_make_gradients);
  for (const Action& action : step.last) {
    switch (action.kind) {
      case Action::Kind::fetch:
        use_ = lowering_.use(action.layer, tasks_);
        lowering_.prefetch(tasks_);
        break;
      case Action::Kind::gradients:
        gradients_ = lowering_.gradients(action.layer, tasks_);
        break;
      case Action::Kind::release:
        lowering_.release(use_);
        lowering_.prefetch(tasks_);
        break;
      case Action::Kind::commit:
        lowering_.commit(gradients_, tasks_);
        break;
      case Action::Kind::compute_forward:
      case Action::Kind::compute_backward:
        break;
    }
    // Ids count up from 0, one for each task.
    next += static_cast<TaskId>(tasks_.size());
    tasks_.clear();
  }
  lowering_.forget_before(next);
  return next;
}

Simulation Simulator::run() {
  first_id_ = warm_up();
  graph_.restart(first_id_);
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
  result_.cores_of_device = result_.use[static_cast<std::size_t>(Resource::device)] * costs_.device_core_share();
  result_.step_seconds = now_ / result_.steps + costs_.step_overhead();
  result_.rates = {compute_seconds_, to_device_.rate(), to_host_.rate(), cpu_update_.rate()};
  return result_;
}

/// The end of a step: its updates, and the save that is to begin with the first.
void Simulator::update() {
  lowering_.update(tasks_);
  updates_left_ += std::count_if(tasks_.begin(), tasks_.end(), [](const Task& task) { return is_update(task.kind); });
  if (options_.save && !std::exchange(save_begun_, true)) {
    const std::size_t before = tasks_.size();
    lowering_.save(tasks_);
    saves_left_ = static_cast<std::int64_t>(tasks_.size() - before);
  }
  lowering_.end_pass();
  if (options_.give_up_after < std::numeric_limits<double>::infinity()) bound_by_updates();
  submit();
}

/// A layer's forward waits for the updates of all before it and its own, which take at least as long as what they use
/// most.
void Simulator::bound_by_updates() {
  ResourceShares busy{};
  double cpu = 0.0;
  double ahead = 0.0;  // forward of the layers before, of all micro-batches that pass through them first
  double at_once = 0.0;
  for (const Action& action : walk_.passes > 1 ? walk_.pass : walk_.last) {
    if (action.kind == Action::Kind::compute_forward && action.layer == 0) at_once += action.micro_batches;
  }
  int layer = 0;
  const auto bound = [&] {
    const double updated = std::max(cpu, *std::max_element(busy.begin(), busy.end()));
    least_ = std::max(least_, updated + compute_left_ - ahead);
  };
  for (const Task& task : tasks_) {
    if (!is_update(task.kind)) continue;  // nobody waits for it
    for (; layer < task.layer; ++layer) {
      bound();
      ahead += at_once * compute_[static_cast<std::size_t>(layer)].forward;
    }
    const TaskCost cost = cost_of(task);
    for (std::size_t r = 0; r < busy.size(); ++r) busy[r] += cost.seconds * cost.share[r];
    if (task.lane == Lane::cpu) cpu += cost.seconds;
  }
  bound();
}

/// What the engine waits for at the end of a step.
bool Simulator::gradients_complete() const {
  const std::vector<TaskId>& norms = lowering_.norm_tasks();
  return action_ == walk_.size() && computes_.empty() &&
         std::all_of(norms.begin(), norms.end(), [&](TaskId id) { return graph_.done(id); });
}

void Simulator::begin_step() {
  openings_.clear();
  lowering_.begin_step(walked_.micro_batches);
  lowering_.prefetch(tasks_);
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
    if (!blocked_ && !act(walk_[action_])) blocked_ = true;
    if (blocked_) {
      if (graph_.node(begins_).waiting_for > 0) return moved;
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
      use_ = lowering_.use(action.layer, tasks_);
      lowering_.prefetch(tasks_);
      submit(action);
      return may_begin(use_.id);
    case Action::Kind::gradients:
      gradients_ = lowering_.gradients(action.layer, tasks_);
      submit(action);
      for (const GradientPlace& place : gradients_.gradients) {
        if (!place.fresh) continue;
        const auto elements = static_cast<double>(layout_.layer(place.layer).summed_elements);
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
      lowering_.release(use_);
      end_with_last_compute(use_.id);
      lowering_.prefetch(tasks_);
      submit(action);
      return true;
    case Action::Kind::commit:
      lowering_.commit(gradients_, tasks_);
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
  computes_.push_back({std::exchange(begun_, {}),
                       {},
                       action.layer,
                       backward,
                       action.opens_pass,
                       seconds_of(action) + zero_seconds_,
                       inputs_of(action, backward)});
  zero_seconds_ = 0.0;
}

/// Forward of a layer writes what the next one takes in, and backward reads what the layer took in itself.
InputCopies::Part Simulator::inputs_of(const Action& action, bool backward) {
  if (plan_.offloaded_input_bytes == 0) return {};
  if (action.opens_pass) {
    inputs_.begin_pass(
        static_cast<std::size_t>(action_ < walk_.before_last() ? walked_.at_once : walked_.in_last_pass()));
  }
  if (backward) return action.layer > 0 ? inputs_.read() : InputCopies::Part{};
  return action.layer + 1 < layout_.layer_count() ? inputs_.written(action.micro_batches) : InputCopies::Part{};
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
  return inputs_.may_run(compute.inputs) && std::all_of(compute.begins.begin(), compute.begins.end(),
                                                        [&](TaskId id) { return graph_.dependencies_done(id); });
}

Resource Simulation::bound_by() const noexcept {
  const auto of = [this](Resource resource) { return use[static_cast<std::size_t>(resource)]; };
  ResourceShares counted = use;
  counted[static_cast<std::size_t>(Resource::cores)] -= cores_of_device;
  const auto most = static_cast<Resource>(std::max_element(counted.begin(), counted.end()) - counted.begin());
  if (most != Resource::link) return most;
  return of(Resource::to_host) > of(Resource::to_device) ? Resource::to_host : Resource::to_device;
}

Simulation simulate(const ParameterLayout& layout, const Plan& plan, const MachineProfile& profile,
                    std::span<const LayerSeconds> compute, const SimulationOptions& options) {
  const std::size_t layers = layout.layers().size();
  if (plan.layers.size() != layers || compute.size() != layers) {
    throw MisuseError(fmt::format("simulation of {} layers", layers),
                      fmt::format("the plan has {}, and seconds are given of {}", plan.layers.size(), compute.size()));
  }
  if (options.micro_batches < 1 || options.micro_batches > plan.max_micro_batches) {
    throw MisuseError(fmt::format("simulation of {} micro-batches", options.micro_batches),
                      fmt::format("the plan allows 1 to {}", plan.max_micro_batches));
  }
  const Accumulation whole{options.micro_batches, std::min(plan.micro_batches_at_once, options.micro_batches)};
  const bool each = options.trace != nullptr || options.each_micro_batch;
  const int fewest = plan.offloaded_input_bytes > 0 ? micro_batches_of_inputs : fewest_micro_batches;
  const int most = options.measured_rates ? micro_batches_of_rates : fewest;
  const Accumulation walked = each ? whole : coarsened(whole, most);
  SimulationMemory own;
  SimulationMemory& memory = options.memory == nullptr ? own : *options.memory;
  const auto run = [&](const Plan& simulated, std::int64_t piece) {
    return Simulator(layout, simulated, profile, compute, options, walked, whole, piece, memory).run();
  };
  const bool as_planned =
      plan.max_micro_batches == walked.micro_batches && plan.micro_batches_at_once == walked.at_once;
  if (as_planned && options.coarse_pieces == 0) return run(plan, 0);
  Plan simulated = plan;
  simulated.max_micro_batches = walked.micro_batches;
  simulated.micro_batches_at_once = walked.at_once;
  if (options.coarse_pieces == 0) return run(simulated, 0);
  return run(coarsened(layout, std::move(simulated), options.coarse_pieces), plan.piece_elements);
}

}  // namespace tandem
