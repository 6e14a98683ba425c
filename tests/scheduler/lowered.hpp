#pragma once
// Steps of a small layout under a policy, as tasks.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <optional>
#include <string>

#include "scheduler/tasks/lowering.hpp"

namespace tandem::testing {

/// `gradient`: of the largest parameters; those of bf16 stand beside one of fp32 in every second layer, so that layers
/// of one class are cut at different places. `factors`: those layers have a matrix more, which may cross the link in a
/// byte an element.
inline ParameterLayout small_layout(DType gradient = DType::f32, bool factors = false) {
  ParameterLayout layout;
  layout.add_layer("embedding").add("t", {9, 1024}).add("still", {700}, {.trainable = false});
  for (int i = 0; i < 5; ++i) {
    auto layer = layout.add_layer("h." + std::to_string(i));
    layer.add("w", {300'000}, {.gradient = gradient});
    if (gradient == DType::bf16 && i % 2 == 0) layer.add("b", {150'000});
    if (factors) layer.add("f", {300, 500}, {.gradient = gradient, .fp8_factor = true});
  }
  layout.add_layer("head").add("t", {9, 1024}).add("n", {10});
  layout.tie("embedding.t", "head.t");
  return layout;
}

/// How many micro-batches a step has, and how many of them pass through a layer in one use.
struct Order {
  int micro_batches = 2;
  int at_once = 1;
  bool owners_make = false;  ///< OffloadOptions::owners_make_gradients
};

struct Lowered {
  ParameterLayout layout;
  Order order;
  Plan plan;
  TaskList tasks;
  std::map<TaskId, GradientUse> commits;  ///< by task
  bool speculates = false;                ///< every third step is then retracted, and in each a layer is used once more
  LayerIndex unused;                      ///< a layer whose gradients come without its weights

  explicit Lowered(const std::string& policy, int resident = 0, int prefetch = 2, StateFormat state = StateFormat::fp32,
                   Order o = {}, DType gradient = DType::f32, Rank rank = {}, bool factors = false)
      : layout(small_layout(gradient, factors)), order(o) {
    OffloadOptions options;
    options.state = state;
    options.rank = rank;
    options.policy = parse_policy(policy);
    options.resident_layers = options.policy.kind == Policy::Kind::device ? std::nullopt : std::optional(resident);
    options.prefetch_layers = prefetch;
    options.max_micro_batches = order.micro_batches;
    options.micro_batches_at_once = order.at_once;
    options.owners_make_gradients = order.owners_make;
    options.subgroup_size = 100'000;
    plan = make_plan(layout, options, {std::size_t{1} << 34, 0});
  }

  /// The state of every so manieth subgroup that has it on the host.
  void put_in_file(int every, int buffers) {
    int index = 0;
    for (Subgroup& s : plan.subgroups) {
      if (s.tier == Tier::host && ++index % every == 0) s.tier = Tier::file;
    }
    plan.file_buffers = buffers;
  }

  /// Updates may run before the norm is known.
  void speculate() {
    speculates = true;
    for (Subgroup& s : plan.subgroups) s.speculates = s.updater == Updater::cpu && s.tier == Tier::host;
  }

  void pass(Lowering& u, LayerIndex l, int gradients) {
    std::optional<LayerUse> use;
    if (l != unused) use = u.use(l, tasks);
    u.prefetch(tasks);
    for (int micro = 0; micro < gradients; ++micro) {
      const GradientUse g = u.gradients(l, tasks);
      commits[g.id] = g;
      u.commit(g, tasks);
    }
    if (use) u.release(*use);
    u.prefetch(tasks);
  }

  void steps(int count, bool saving = false) {
    Lowering u(layout, plan);
    const LayerIndex last(layout.layer_count() - 1);
    for (int s = 0; s < count; ++s) {
      u.begin_step({.micro_batches = order.micro_batches},
                   speculates ? UpdateTime::speculative : UpdateTime::after_norm);
      u.prefetch(tasks);
      for (int first = 0; first < order.micro_batches; first += order.at_once) {
        const int at_once = std::min(order.at_once, order.micro_batches - first);
        for (const LayerIndex l : layers_of(layout)) pass(u, l, 0);
        for (LayerIndex l = last; !l.none(); --l) pass(u, l, at_once);
      }
      EXPECT_TRUE(u.gradients_complete());
      // Uses of layers whose updates have been emitted see the old weights.
      if (speculates) pass(u, last - 1, 0);
      if (speculates) pass(u, LayerIndex(2), 0);
      speculates && s % 3 == 1 ? u.retract(tasks) : u.update(tasks);
      u.end_pass();
      if (saving) u.save(tasks);
    }
  }
};

}  // namespace tandem::testing
