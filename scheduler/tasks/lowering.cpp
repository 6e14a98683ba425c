#include "scheduler/tasks/lowering.hpp"

namespace tandem {

Lowering::Lowering(const ParameterLayout& layout, const Plan& plan, TaskCount begin)
    : state_(layout, plan, begin), weights_(state_), gradients_(state_), updates_(state_, weights_), saves_(state_) {}

void Lowering::begin_step(int micro_batches, bool update_in_backward) {
  ++state_.step;
  update_in_backward_ = update_in_backward;
  weights_.begin_step();
  gradients_.begin_step(micro_batches);
  weights_.enter(WeightRing::Direction::forward);
}

void Lowering::begin_evaluation() { weights_.enter(WeightRing::Direction::evaluation); }

void Lowering::end_pass() { weights_.enter(WeightRing::Direction::none); }

GradientUse Lowering::gradients(int layer, TaskList& out) {
  GradientUse use = gradients_.gradients(layer, out);
  if (!use.gradients.empty()) weights_.enter_backward(layer);
  return use;
}

void Lowering::commit(const GradientUse& use, TaskList& out) {
  // A layer without state may be committed too, even behind the last one that counts.
  if (use.gradients.empty()) return;
  gradients_.count_commit(use);
  for (const GradientPlace& place : use.gradients) {
    const bool complete = gradients_.commit(use, place, out);
    if (complete && update_in_backward_) updates_.update_layer(place.layer, out);
  }
  // Forward through all layers, then backward, for as many micro-batches as pass at once.
  if (gradients_.next_pass()) weights_.enter(WeightRing::Direction::forward);
}

void Lowering::update(TaskList& out) {
  if (update_in_backward_) return;
  for (int l = 0; l < state_.layout.layer_count(); ++l) updates_.update_layer(l, out);
}

void Lowering::forget_before(TaskId id) {
  weights_.forget_before(id);
  gradients_.forget_before(id);
}

}  // namespace tandem
