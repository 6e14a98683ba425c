#include "scheduler/tasks/step_commits.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "core/base/error.hpp"

namespace tandem {

StepCommits::StepCommits(const LoweringState& state) : state_(state), layers_(state.layout.layers().size()) {
  for (const LayerIndex l : layers_.indices()) {
    const Layer& layer = state.layer(l);
    if (layer.state_elements > 0) ++layers_to_commit_;
    of(l).uses = layer.uses;
    of(l).contributions += layer.uses;
    for (const int owner : layer.borrows) {
      if (state.adds_to(LayerIndex(owner), l)) of(LayerIndex(owner)).contributions += layer.uses;
    }
  }
}

void StepCommits::begin_step(const StepExtent& extent) {
  extent_ = extent;
  micro_batches_ = extent.micro_batches;
  for (LayerCommits& layer : layers_) {
    layer.asked = layer.committed = layer.sent = 0;
    layer.is_final = false;
  }
  layer_at_work_ = {};
  open_micro_batches(0);
}

/// Opens the micro-batches from `first` on: as many as pass through the layers at once, or as are left.
void StepCommits::open_micro_batches(int first) {
  micro_begin_ = first;
  micro_end_ = std::min(first + state_.plan.micro_batches_at_once, micro_batches_);
  gradients_left_ = layers_to_commit_ * (micro_end_ - first);
}

bool StepCommits::next_pass() {
  if (gradients_left_ != 0 || micro_end_ >= micro_batches_) return false;
  open_micro_batches(micro_end_);
  return true;
}

bool StepCommits::begun() const noexcept {
  return std::ranges::any_of(layers_,
                             [this](const LayerCommits& layer) { return layer.asked > micro_begin_ * layer.uses; });
}

/// The first layer, as backward comes to it, that has not committed in these micro-batches, in words; empty: all have.
std::string StepCommits::missing_in_pass() const {
  if (gradients_left_ == 0) return {};
  for (LayerIndex l = state_.last_layer(); !l.none(); --l) {
    const Layer& layer = state_.layer(l);
    const bool adds = std::ranges::any_of(state_.touched_by(l), [&](LayerIndex owner) {
      return state_.layer(owner).state_elements > 0 && state_.adds_to(owner, l);
    });
    const int committed = of(l).committed;
    if (adds && committed < micro_end_ * layer.uses) {
      return fmt::format("layer {} has not in micro-batch {}", layer.name, committed / layer.uses);
    }
  }
  return {};
}

std::string StepCommits::missing() const {
  if (layers_to_commit_ == 0) return {};
  const bool untouched = !begun();
  if (!extent_.may_be_absent && !(extent_.open_ended && untouched && micro_begin_ > 0)) {
    if (std::string missing = missing_in_pass(); !missing.empty()) return missing;
  }
  if (extent_.open_ended || micro_end_ == micro_batches_) return {};
  return fmt::format("{} of {} micro-batches have begun", untouched ? micro_begin_ : micro_end_, micro_batches_);
}

void StepCommits::require_next_micro_batch() const {
  if (const std::string missing = missing_in_pass(); !extent_.may_be_absent && !missing.empty()) {
    throw MisuseError("begin_micro_batch before every layer has committed its gradients", missing);
  }
  if (micro_end_ >= micro_batches_) {
    throw MisuseError("begin_micro_batch after the last one", fmt::format("the step has {}", micro_batches_));
  }
}

void StepCommits::begin_next_micro_batch() {
  open_micro_batches(micro_end_);
  for (LayerCommits& layer : layers_) layer.asked = layer.committed = micro_begin_ * layer.uses;
}

void StepCommits::end() noexcept {
  if (extent_.open_ended && micro_batches_ > 1) micro_batches_ = begun() ? micro_end_ : std::max(1, micro_begin_);
  gradients_left_ = 0;
}

void StepCommits::require_next(LayerIndex layer) const {
  const LayerCommits& commits = of(layer);
  const std::string& name = state_.layer(layer).name;
  if (commits.asked > commits.committed) {
    throw MisuseError("gradients of layer " + name + " of the micro-batch before are not committed");
  }
  if (state_.plan.sends_sums && micro_batches_ > 1 && !layer_at_work_.none() && layer_at_work_ != layer) {
    if (of(layer_at_work_).committed < micro_batches_) {
      throw MisuseError("gradients of layer " + name + " before all micro-batches of layer " +
                            state_.layer(layer_at_work_).name + " are committed",
                        "the plan adds them up on the device, a layer at a time");
    }
  }
  if (commits.asked == micro_end_ * commits.uses) {
    throw MisuseError("gradients of layer " + name + " are already committed in this micro-batch",
                      state_.plan.micro_batches_at_once > 1 ? "and in all that pass through the layers at once" : "");
  }
}

void StepCommits::ask(LayerIndex layer) {
  ++of(layer).asked;
  layer_at_work_ = layer;
}

}  // namespace tandem
