#include "scheduler/plan/resident_layers.hpp"

#include <algorithm>
#include <numeric>

#include "scheduler/plan/walk.hpp"

namespace tandem {
namespace {

/// How often a pass through all layers fetches each one's weights. What is shared is fetched with whoever shares it.
IndexedVector<LayerIndex, int> fetches_of_pass(const ParameterLayout& layout, bool first_again) {
  IndexedVector<LayerIndex, int> fetches(layout.layers().size());
  for (const Action& action : walk_of(layout.layer_count(), {}, {}, first_again).pass) {
    if (action.kind != Action::Kind::fetch) continue;
    ++fetches[action.layer];
    for (const int owner : layer_at(layout, action.layer).borrows) ++fetches[LayerIndex(owner)];
  }
  return fetches;
}

}  // namespace

std::vector<LayerIndex> by_worth_of_residence(const ParameterLayout& layout, const Plan& plan) {
  const IndexedVector<LayerIndex, int> fetches = fetches_of_pass(layout, plan.owners_make_gradients);
  const int passes = Accumulation{plan.max_micro_batches, plan.micro_batches_at_once}.passes();
  // Crossings of an element's weight in a step: each fetch is saved. What the CPU has updated is sent to a layer that
  // stays; what the device has updated returns from one that does not, and is loaded for that where the weight is a
  // part of the master.
  const double from_cpu = -1.0, from_device = reads_weights(plan.state) ? 2.0 : 1.0;
  // Crossings of all elements of a layer: whole numbers, so that equals are equal.
  IndexedVector<LayerIndex, double> crossings(fetches.size());
  for (const Subgroup& s : plan.subgroups) {
    const double of_each = s.updater == Updater::cpu ? from_cpu : from_device;
    crossings[layer_of(s)] += of_each * static_cast<double>(s.count());
  }
  for (const LayerIndex l : fetches.indices()) {
    crossings[l] = fetches[l] * passes + crossings[l] / static_cast<double>(layer_at(layout, l).elements);
  }
  std::vector<LayerIndex> order(fetches.size());
  std::iota(order.begin(), order.end(), LayerIndex(0));
  std::ranges::stable_sort(order, std::ranges::greater(), [&](LayerIndex l) { return crossings[l]; });
  return order;
}

}  // namespace tandem
