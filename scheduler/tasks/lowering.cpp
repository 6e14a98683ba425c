#include "scheduler/tasks/lowering.hpp"

namespace tandem {

Lowering::Lowering(const ParameterLayout& layout, const Plan& plan, TaskCount begin)
    : state_(layout, plan, begin), weights_(state_), gradients_(state_), updates_(state_, weights_), saves_(state_) {}

void Lowering::begin_step(const StepExtent& extent, UpdateTime update_time) {
  ++state_.step;
  update_time_ = update_time;
  updated_layers_ = 0;
  norm_tasks_begin_ = 0;
  weights_.begin_step();
  gradients_.begin_step(extent);
  weights_.enter(WeightRing::Direction::forward);
}

void Lowering::begin_micro_batch(bool last, TaskList& out) {
  gradients_.begin_micro_batch(last, out);
  weights_.enter(WeightRing::Direction::forward);
}

void Lowering::end_gradients(Missing missing, TaskList& out) {
  gradients_.end_step(missing, out);
  update_complete(out);
}

void Lowering::begin_evaluation() { weights_.enter(WeightRing::Direction::evaluation); }

void Lowering::end_pass() { weights_.enter(WeightRing::Direction::none); }

GradientUse Lowering::gradients(LayerIndex layer, TaskList& out) {
  GradientUse use = gradients_.gradients(layer, out);
  if (!use.gradients.empty()) weights_.enter_backward(layer);
  return use;
}

void Lowering::commit(const GradientUse& use, TaskList& out) {
  // A layer without state may be committed too, even behind the last one that counts.
  if (use.gradients.empty()) return;
  gradients_.count_commit(use);
  for (const GradientPlace& place : use.gradients) gradients_.commit(use, place, out);
  update_complete(out);
  // Forward through all layers, then backward, for as many micro-batches as pass at once.
  if (gradients_.next_pass()) weights_.enter(WeightRing::Direction::forward);
}

LayerUse Lowering::use(LayerIndex layer, TaskList& out) {
  if (has_layer(state_.layout, layer)) {
    for (const LayerIndex needed : state_.touched_by(layer)) updates_.retract_layer(needed, out);
  }
  return weights_.use(layer, out);
}

/// Begins, in backward, the updates of layers whose gradient has become complete.
void Lowering::update_complete(TaskList& out) {
  if (update_time_ == UpdateTime::after_norm) return;
  const std::vector<CompleteLayer>& complete = gradients_.complete_layers();
  for (; updated_layers_ < complete.size(); ++updated_layers_) begin_update(complete[updated_layers_], out);
}

void Lowering::begin_update(const CompleteLayer& complete, TaskList& out) {
  if (update_time_ == UpdateTime::in_backward) return updates_.update_layer(complete.layer, out);
  const std::span<const TaskId> all = gradients_.norm_tasks();
  updates_.speculate_layer(complete.layer, all.subspan(norm_tasks_begin_, complete.norm_tasks_end - norm_tasks_begin_),
                           out);
  norm_tasks_begin_ = complete.norm_tasks_end;
}

void Lowering::retract(TaskList& out) {
  for (const LayerIndex l : layers_of(state_.layout)) updates_.retract_layer(l, out);
}

void Lowering::update(TaskList& out) {
  if (update_time_ == UpdateTime::in_backward) return;
  for (const LayerIndex l : layers_of(state_.layout)) {
    if (gradients_.has_gradient(l)) updates_.update_layer(l, out);
  }
}

void Lowering::forget_before(TaskId id) {
  weights_.forget_before(id);
  gradients_.forget_before(id);
}

}  // namespace tandem
