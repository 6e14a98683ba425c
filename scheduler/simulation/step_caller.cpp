#include "scheduler/simulation/step_caller.hpp"

#include <algorithm>
#include <utility>

namespace tandem {

StepCaller::StepCaller(const ParameterLayout& layout, const Plan& plan, const CostModel& costs,
                       std::span<const LayerSeconds> compute, const Accumulation& walked, const Accumulation& whole,
                       Lowering& lowering, StepTasks& tasks)
    : layout_(layout),
      plan_(plan),
      costs_(costs),
      compute_(compute),
      walked_(walked),
      walk_(walk_of(layout.layer_count(), walked, whole, plan.owners_make_gradients)),
      lowering_(lowering),
      tasks_(tasks),
      graph_(tasks.graph()),
      // The last layer computes the loss: it takes in what the one before it leaves, and leaves nothing.
      inputs_(layout.layers().size() - 1, static_cast<std::size_t>(walked.at_once)),
      compute_of_step_(static_cast<double>(walk_.passes - 1) * seconds_of(walk_.pass) + seconds_of(walk_.last)),
      compute_left_(compute_of_step_) {}

TaskId StepCaller::warm_up() {
  TaskId next(0);
  TaskList& emitted = tasks_.emitted();
  emitted.clear();
  lowering_.begin_step({.micro_batches = 1});
  lowering_.prefetch(emitted);
  const bool alone = walked_.micro_batches == 1;
  const Walk step = alone ? walk_ : walk_of(layout_.layer_count(), {}, {}, plan_.owners_make_gradients);
  for (const Action& action : step.last) {
    switch (action.kind) {
      case Action::Kind::fetch:
        use_ = lowering_.use(action.layer, emitted);
        lowering_.prefetch(emitted);
        break;
      case Action::Kind::gradients:
        gradients_ = lowering_.gradients(action.layer, emitted);
        break;
      case Action::Kind::release:
        lowering_.release(use_);
        lowering_.prefetch(emitted);
        break;
      case Action::Kind::commit:
        lowering_.commit(gradients_, emitted);
        for (int use = 1; use < layer_at(layout_, action.layer).uses; ++use) {
          lowering_.commit(lowering_.gradients(action.layer, emitted), emitted);
        }
        break;
      case Action::Kind::compute_forward:
      case Action::Kind::compute_backward:
        break;
    }
    // Ids count up from 0, one for each task.
    next += static_cast<std::int64_t>(emitted.size());
    emitted.clear();
  }
  lowering_.forget_before(next);
  return next;
}

void StepCaller::begin_step() {
  const UpdateTime time = plan_.updates_in_backward       ? UpdateTime::in_backward
                          : plan_.counts_on_speculation() ? UpdateTime::speculative
                                                          : UpdateTime::after_norm;
  lowering_.begin_step({.micro_batches = walked_.micro_batches}, time);
  lowering_.prefetch(tasks_.emitted());
  tasks_.submit();
}

// -- its thread ------------------------------------------------------------------------------------------

bool StepCaller::advance() {
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
bool StepCaller::act(const Action& action) {
  TaskList& emitted = tasks_.emitted();
  switch (action.kind) {
    case Action::Kind::fetch:
      use_ = lowering_.use(action.layer, emitted);
      lowering_.prefetch(emitted);
      tasks_.submit(action);
      return may_begin(use_.id);
    case Action::Kind::gradients:
      gradients_ = lowering_.gradients(action.layer, emitted);
      tasks_.submit(action);
      for (const GradientPlace& place : gradients_.gradients) {
        if (!place.fresh) continue;
        const auto elements = static_cast<double>(layer_at(layout_, place.layer).summed_elements);
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
      lowering_.prefetch(emitted);
      tasks_.submit(action);
      return true;
    case Action::Kind::commit:
      lowering_.commit(gradients_, emitted);
      tasks_.submit(action);
      end_with_last_compute(gradients_.id);
      for (int use = 1; use < layer_at(layout_, action.layer).uses; ++use) commit_again(action);
      return true;
  }
  return true;
}

/// A further use of a layer in the same backward, whose time is in that of the first.
void StepCaller::commit_again(const Action& action) {
  gradients_ = lowering_.gradients(action.layer, tasks_.emitted());
  lowering_.commit(gradients_, tasks_.emitted());
  tasks_.submit(action);
  end_with_last_compute(gradients_.id);
}

/// The caller's thread has queued all work of its task: issued, and done when its stream gets there.
void StepCaller::end_with_last_compute(TaskId id) {
  computes_.back().ends.push_back(id);
  graph_.mark_issued(id);
}

/// Whether the caller may begin the task: its stream will wait until what the task depends on is done; the thread only
/// until it is issued.
bool StepCaller::may_begin(TaskId id) {
  begins_ = id;
  begun_.push_back(id);
  return graph_.node(id).waiting_for == 0;
}

// -- its stream ------------------------------------------------------------------------------------------

/// Seconds on the caller's stream, without those to zero buffers.
double StepCaller::seconds_of(const Action& action) const {
  const LayerSeconds& seconds = compute_of(action.layer);
  if (action.kind == Action::Kind::compute_forward) return action.micro_batches * seconds.forward;
  return action.kind == Action::Kind::compute_backward ? action.micro_batches * seconds.backward : 0.0;
}

double StepCaller::seconds_of(std::span<const Action> actions) const {
  double seconds = 0.0;
  for (const Action& action : actions) seconds += seconds_of(action);
  return seconds;
}

void StepCaller::queue_compute(const Action& action, bool backward) {
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
InputCopies::Part StepCaller::inputs_of(const Action& action, bool backward) {
  if (plan_.offloaded_input_bytes == 0) return {};
  if (action.opens_pass) {
    inputs_.begin_pass(
        static_cast<std::size_t>(action_ < walk_.before_last() ? walked_.at_once : walked_.in_last_pass()));
  }
  if (backward) return action.layer > LayerIndex(0) ? inputs_.read() : InputCopies::Part{};
  return has_layer(layout_, action.layer + 1) ? inputs_.written(action.micro_batches) : InputCopies::Part{};
}

bool StepCaller::may_run(const Compute& compute) const {
  return inputs_.may_run(compute.inputs) && std::all_of(compute.begins.begin(), compute.begins.end(),
                                                        [&](TaskId id) { return graph_.dependencies_done(id); });
}

Compute StepCaller::end_compute() {
  Compute ended = std::move(computes_.front());
  computes_.pop_front();
  compute_left_ -= ended.seconds;
  inputs_.ran(ended.inputs);
  return ended;
}

// -- passes that repeat each other, and the least that a step takes --------------------------------------

std::int64_t StepCaller::passes_to_skip() const {
  const std::int64_t pass = action_ / static_cast<std::int64_t>(walk_.pass.size());
  return walk_.passes - 1 - pass - 1;
}

void StepCaller::skip(std::int64_t passes) {
  action_ += passes * static_cast<std::int64_t>(walk_.pass.size());
  compute_left_ -= static_cast<double>(passes) * seconds_of(walk_.pass);
  lowering_.leave_out(static_cast<int>(passes) * walked_.at_once);
}

double StepCaller::least_seconds(const TaskList& updates) const {
  ResourceShares busy{};
  double cpu = 0.0;
  double ahead = 0.0;  // forward of the layers before, of all micro-batches that pass through them first
  double at_once = 0.0;
  for (const Action& action : walk_.passes > 1 ? walk_.pass : walk_.last) {
    if (action.kind == Action::Kind::compute_forward && action.layer == LayerIndex(0)) at_once += action.micro_batches;
  }
  LayerIndex layer(0);
  double least = 0.0;
  const auto bound = [&] {
    const double updated = std::max(cpu, *std::max_element(busy.begin(), busy.end()));
    least = std::max(least, updated + compute_left_ - ahead);
  };
  for (const Task& task : updates) {
    if (!is_update(task.kind)) continue;  // nobody waits for it
    for (; layer < task.layer; ++layer) {
      bound();
      ahead += at_once * compute_of(layer).forward;
    }
    const TaskCost cost = tasks_.cost_of(task);
    for (std::size_t r = 0; r < busy.size(); ++r) busy[r] += cost.seconds * cost.share[r];
    if (task.lane == Lane::cpu) cpu += cost.seconds;
  }
  bound();
  return least;
}

}  // namespace tandem
