#include "scheduler/traffic.hpp"

#include <algorithm>

#include "scheduler/unfold.hpp"

namespace tandem {
namespace {

class Count {
 public:
  explicit Count(Unfolder& unfolder) : unfolder_(unfolder) {}

  /// With the gradients of so many micro-batches.
  void pass(int layer, int gradients) {
    const Visit visit = unfolder_.visit(layer, tasks_);
    unfolder_.prefetch(tasks_);
    for (int micro = 0; micro < gradients; ++micro) {
      const GradientVisit filled = unfolder_.gradients(layer, tasks_);
      unfolder_.commit(filled, tasks_);
    }
    unfolder_.release(visit);
    unfolder_.prefetch(tasks_);
    add();
  }

  void add() {
    for (const Task& task : tasks_) {
      if (task.lane == Lane::host_to_device) traffic.host_to_device += task.bytes;
      if (task.lane == Lane::device_to_host) traffic.device_to_host += task.bytes;
    }
    if (!tasks_.empty()) unfolder_.forget_before(tasks_.back().id);
    tasks_.clear();
  }

  TaskList& tasks() { return tasks_; }
  Traffic traffic;

 private:
  Unfolder& unfolder_;
  TaskList tasks_;
};

}  // namespace

Traffic predict_traffic(const ParameterLayout& layout, const Plan& plan, int micro_batches, int steps) {
  Unfolder unfolder(layout, plan);
  Count count(unfolder);
  for (int step = 0; step < steps; ++step) {
    unfolder.begin_step(micro_batches);
    unfolder.prefetch(count.tasks());
    for (int first = 0; first < micro_batches; first += plan.micro_batches_at_once) {
      const int at_once = std::min(plan.micro_batches_at_once, micro_batches - first);
      for (int l = 0; l < layout.layer_count(); ++l) count.pass(l, 0);
      for (int l = layout.layer_count() - 1; l >= 0; --l) count.pass(l, at_once);
    }
    unfolder.update(count.tasks());
    unfolder.end_pass();
    count.add();
  }
  return count.traffic;
}

Traffic traffic_of_step(const ParameterLayout& layout, Plan plan, int micro_batches) {
  plan.piece_elements = plan.subgroup_size;  // as many bytes in fewer tasks
  constexpr int cold = 2;                    // from then on each step finds what the one before it left
  const Traffic before = predict_traffic(layout, plan, micro_batches, cold);
  const Traffic after = predict_traffic(layout, plan, micro_batches, cold + 1);
  return {after.host_to_device - before.host_to_device, after.device_to_host - before.device_to_host};
}

}  // namespace tandem
