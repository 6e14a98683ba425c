// The gradient norm, to the bit: its order of additions is part of what two runs agree on.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "core/numerics/norm_block.hpp"
#include "core/ops/update_kernels.hpp"
#include "tests/offload/toy/trainer.hpp"

namespace tandem {
namespace {

using testing::noise;
using testing::toy;
using testing::ToyOptions;

/// Large enough that other orders of the same additions round otherwise.
ParameterLayout layout_of_many_blocks() {
  ParameterLayout layout;
  layout.add_layer("first").add("table", {7, 5501});
  layout.add_layer("middle").add("frozen", {2000}, {.trainable = false}).add("b", {33}).add("w", {100003});
  layout.add_layer("last").add("norm", {1025}).add("w", {22, 3001});
  return layout;
}

/// Gradient in bf16, blocks apart in size by up to 2^24: the squares of few sizes would add up without rounding.
bf16 gradient_of(const Parameter& p, std::int64_t i) {
  const auto counter = static_cast<std::uint64_t>(i);
  const auto key = static_cast<std::uint64_t>(100 + 10 * p.layer + p.offset / 1024);
  return numerics::round_to_bf16(noise(key, counter) * std::exp2(12.0F * noise(key + 1, counter / 1024)));
}

/// A layer's blocks of 1,024 elements, padding left out.
std::vector<double> blocks_of(const Layer& layer) {
  std::vector<double> blocks;
  for (const Parameter& p : layer.parameters) {
    if (!p.options.trainable) continue;
    std::vector<bf16> values(static_cast<std::size_t>(p.count));
    for (std::int64_t i = 0; i < p.count; ++i) values[static_cast<std::size_t>(i)] = gradient_of(p, i);
    for (std::int64_t at = 0; at < p.count; at += layout_quantum) {
      blocks.push_back(numerics::norm_block(values.data() + at, std::min(layout_quantum, p.count - at)));
    }
  }
  return blocks;
}

double norm_as_documented(const ParameterLayout& layout) {
  double squares = 0.0;
  for (int l = 0; l < layout.layer_count(); ++l) {
    double of_layer = 0.0;
    for (const double block : blocks_of(layout.layer(l))) of_layer += block;
    squares += of_layer;
  }
  return std::sqrt(squares);
}

double norm_in_one_chain(const ParameterLayout& layout) {
  double squares = 0.0;
  for (int l = 0; l < layout.layer_count(); ++l) {
    for (const double block : blocks_of(layout.layer(l))) squares += block;
  }
  return std::sqrt(squares);
}

double norm_of_engine(const ParameterLayout& layout, ToyOptions o) {
  const auto toy_device = o.make_device(o.device);
  Device& device = toy_device->device();
  const Plan plan = make_plan(layout, o.offload, {device.info().capacity, 0});
  OffloadEngine engine(device, layout, o.offload, plan);
  const Stream stream = device.make_stream("compute");
  engine.initialize([](const Parameter&, std::span<float> values) { std::ranges::fill(values, 0.5F); });
  engine.begin_step({.lr = 1e-3, .max_grad_norm = 1.0});
  for (int l = layout.layer_count() - 1; l >= 0; --l) {
    const WeightsGuard weights = engine.fetch(l, stream);
    GradientsGuard gradients = engine.gradients(l, stream);
    for (const Parameter& p : layout.layer(l).parameters) {
      const TensorView g = gradients[p.name];
      if (!g) continue;
      toy_device->enqueue(stream, "fill", weights[p.name], g, [&p](const bf16*, void* out) {
        for (std::int64_t i = 0; i < p.count; ++i) {
          testing::add_gradient(DType::f32, out, i, numerics::bf16_to_float(gradient_of(p, i)));
        }
      });
    }
    gradients.commit(stream);
  }
  const double norm = engine.end_step().gradient_norm;
  engine.wait();
  return norm;
}

TEST(GradientNorm, AddsTheBlocksOfEachLayerInOrderAndThenTheLayers) {
  const ParameterLayout layout = layout_of_many_blocks();
  const double expected = norm_as_documented(layout);
  ASSERT_NE(expected, norm_in_one_chain(layout)) << "gradients that tell no order from another";
  for (const char* policy : {"host", "device", "stream", "interleave:2", "static:0.5"}) {
    for (const std::int64_t subgroup : {1024L, 5120L, 1L << 20}) {
      ToyOptions o = toy(policy);
      o.offload.subgroup_size = subgroup;
      EXPECT_EQ(norm_of_engine(layout, o), expected) << policy << " in subgroups of " << subgroup;
    }
  }
}

}  // namespace
}  // namespace tandem
