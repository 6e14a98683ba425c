#include "scheduler/tasks/traffic.hpp"

#include <algorithm>

#include "scheduler/tasks/lowering.hpp"

namespace tandem {
namespace {

class Count {
 public:
  Count(const ParameterLayout& layout, const Plan& plan, int micro_batches)
      : layout_(layout), at_once_(plan.micro_batches_at_once), micro_batches_(micro_batches), lowering_(layout, plan) {}

  void step() {
    lowering_.begin_step({.micro_batches = micro_batches_});
    lowering_.prefetch(tasks_);
    for (int first = 0; first < micro_batches_; first += at_once_) {
      for (const LayerIndex l : layers_of(layout_)) pass(l, 0);
      for (LayerIndex l(layout_.layer_count() - 1); !l.none(); --l) pass(l, std::min(at_once_, micro_batches_ - first));
    }
    lowering_.update(tasks_);
    lowering_.end_pass();
    add();
  }

  Traffic traffic;

 private:
  /// Passes a layer, with the gradients of so many micro-batches.
  void pass(LayerIndex layer, int gradients) {
    const LayerUse use = lowering_.use(layer, tasks_);
    lowering_.prefetch(tasks_);
    for (int i = 0; i < gradients * layer_at(layout_, layer).uses; ++i) {
      const GradientUse filled = lowering_.gradients(layer, tasks_);
      lowering_.commit(filled, tasks_);
    }
    lowering_.release(use);
    lowering_.prefetch(tasks_);
    add();
  }

  void add() {
    for (const Task& task : tasks_) {
      if (task.lane == Lane::host_to_device) traffic.host_to_device += task.bytes;
      if (task.lane == Lane::device_to_host) traffic.device_to_host += task.bytes;
      if (task.lane == Lane::peers) traffic.from_peers += task.bytes;
    }
    if (!tasks_.empty()) lowering_.forget_before(tasks_.back().id);
    tasks_.clear();
  }

  const ParameterLayout& layout_;
  int at_once_;
  int micro_batches_;
  Lowering lowering_;
  TaskList tasks_;
};

}  // namespace

Traffic traffic_of_step(const ParameterLayout& layout, Plan plan, int micro_batches) {
  plan.piece_elements = plan.subgroup_size;  // fewer tasks for the same bytes
  Count count(layout, plan, micro_batches);
  count.step();
  count.step();  // from then on each step finds what the one before it left
  count.traffic = {};
  count.step();
  return count.traffic;
}

}  // namespace tandem
