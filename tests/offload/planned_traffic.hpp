#pragma once
// Bytes that whole runs move across the link, by lowering their plan.
#include <algorithm>

#include "scheduler/tasks/lowering.hpp"
#include "scheduler/tasks/traffic.hpp"

namespace tandem::testing {

inline void add_traffic(Traffic& traffic, const TaskList& tasks) {
  for (const Task& task : tasks) {
    if (task.lane == Lane::host_to_device) traffic.host_to_device += task.bytes;
    if (task.lane == Lane::device_to_host) traffic.device_to_host += task.bytes;
    if (task.lane == Lane::peers) traffic.from_peers += task.bytes;
  }
}

/// A layer's weights, and the gradients of so many micro-batches, as the toy trainer uses them.
inline void pass_layer(Lowering& lowering, LayerIndex layer, int gradients, TaskList& tasks) {
  const LayerUse use = lowering.use(layer, tasks);
  lowering.prefetch(tasks);
  for (int micro = 0; micro < gradients; ++micro) lowering.commit(lowering.gradients(layer, tasks), tasks);
  lowering.release(use);
  lowering.prefetch(tasks);
}

/// Totals of `steps` steps from a cold start, each of `micro_batches` forwards in layer order and backwards in its
/// reverse, as many at once as the plan has pass through, none skipped, no evaluation between.
inline Traffic planned_traffic(const ParameterLayout& layout, const Plan& plan, int micro_batches, int steps) {
  Lowering lowering(layout, plan);
  TaskList tasks;
  const int at_once = plan.micro_batches_at_once;
  for (int step = 0; step < steps; ++step) {
    lowering.begin_step({.micro_batches = micro_batches});
    lowering.prefetch(tasks);
    for (int first = 0; first < micro_batches; first += at_once) {
      const int gradients = std::min(at_once, micro_batches - first);
      for (const LayerIndex l : layers_of(layout)) pass_layer(lowering, l, 0, tasks);
      for (LayerIndex l(layout.layer_count() - 1); !l.none(); --l) pass_layer(lowering, l, gradients, tasks);
    }
    lowering.update(tasks);
    lowering.end_pass();
  }
  Traffic traffic;
  add_traffic(traffic, tasks);
  return traffic;
}

}  // namespace tandem::testing
