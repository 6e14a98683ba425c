#include "scheduler/plan/resident_layers.hpp"

#include <algorithm>
#include <numeric>

#include "scheduler/plan/walk.hpp"

namespace tandem {
namespace {

/// How often a pass through all layers fetches each one's weights. What is shared is fetched with whoever shares it.
std::vector<int> fetches_of_pass(const ParameterLayout& layout, bool first_again) {
  std::vector<int> fetches(static_cast<std::size_t>(layout.layer_count()));
  for (const Action& action : walk_of(layout.layer_count(), {}, {}, first_again).pass) {
    if (action.kind != Action::Kind::fetch) continue;
    ++fetches[static_cast<std::size_t>(action.layer)];
    for (const int owner : layout.layer(action.layer).borrows) ++fetches[static_cast<std::size_t>(owner)];
  }
  return fetches;
}

}  // namespace

std::vector<int> by_worth_of_residence(const ParameterLayout& layout, const Plan& plan) {
  const std::vector<int> fetches = fetches_of_pass(layout, plan.owners_make_gradients);
  const int passes = Accumulation{plan.max_micro_batches, plan.micro_batches_at_once}.passes();
  // Crossings of an element's weight in a step: each fetch is saved. What the CPU has updated is sent to a layer that
  // stays; what the device has updated returns from one that does not, and is loaded for that where the weight is a
  // part of the master.
  const double from_cpu = -1.0, from_device = reads_weights(plan.state) ? 2.0 : 1.0;
  // Crossings of all elements of a layer: whole numbers, so that equals are equal.
  std::vector<double> crossings(fetches.size());
  for (const Subgroup& s : plan.subgroups) {
    const double of_each = s.updater == Updater::cpu ? from_cpu : from_device;
    crossings[static_cast<std::size_t>(s.layer)] += of_each * static_cast<double>(s.count());
  }
  for (std::size_t l = 0; l < fetches.size(); ++l) {
    crossings[l] = fetches[l] * passes + crossings[l] / static_cast<double>(layout.layer(static_cast<int>(l)).elements);
  }
  std::vector<int> order(fetches.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, std::ranges::greater(),
                           [&](int l) { return crossings[static_cast<std::size_t>(l)]; });
  return order;
}

}  // namespace tandem
