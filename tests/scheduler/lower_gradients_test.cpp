// Lowering closes the buffers of gradients that are refused.
#include <gtest/gtest.h>

#include "core/base/error.hpp"
#include "scheduler/plan/plan.hpp"
#include "scheduler/tasks/lowering.hpp"

namespace tandem {
namespace {

// Nobody would zero it, and whoever asks again would add to what it held.
TEST(LowerGradients, RefusedGradientsLeaveNoBufferOpen) {
  ParameterLayout layout;
  layout.add_layer("embedding").add("tokens", {5000});
  layout.add_layer("h.0").add("w", {5000});
  layout.add_layer("h.1").add("w", {5000});
  layout.add_layer("head").add("tokens", {5000}).add("norm", {7});
  layout.tie("embedding.tokens", "head.tokens");
  OffloadOptions options;
  options.policy = parse_policy("host");
  options.resident_layers = 0;
  options.device_memory = smallest_device_memory(layout, options);
  const Plan plan = make_plan(layout, options, {*options.device_memory, 0});
  Lowering u(layout, plan);
  TaskList tasks;
  u.begin_step({.micro_batches = 1});
  const GradientUse second = u.gradients(LayerIndex(2), tasks);
  const GradientUse first = u.gradients(LayerIndex(1), tasks);
  EXPECT_THROW(u.gradients(LayerIndex(3), tasks), MisuseError) << "the embedding's buffer is taken";
  u.commit(second, tasks);
  u.commit(first, tasks);
  for (const GradientPlace& place : u.gradients(LayerIndex(3), tasks).gradients)
    EXPECT_TRUE(place.fresh) << place.layer.number();
}

}  // namespace
}  // namespace tandem
