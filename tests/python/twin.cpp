// The training of tests/python/toy.py, by the C++ interface: prints the state digest after each policy that is named.
#include <cstdint>
#include <iostream>
#include <span>
#include <string>

#include "tandem/tandem.hpp"

namespace {

using namespace tandem::literals;

constexpr int layers = 3;
constexpr int steps = 4;
constexpr int micro_batches = 2;

tandem::ParameterLayout make_layout() {
  tandem::ParameterLayout layout;
  for (int i = 0; i < layers; ++i) {
    auto layer = layout.add_layer("h." + std::to_string(i));
    layer.add("w1", {48, 37}).add("b1", {55}, {.decay = false});
    layer.add("w2", {1, 2200}, {.gradient = tandem::DType::bf16}).add("still", {22}, {.trainable = false});
  }
  layout.add_layer("head").add("table", {48, 37});
  layout.tie("h.0.w1", "head.table");
  return layout;
}

/// A small value of element `i`, exact in bf16.
float start(std::int64_t i) { return static_cast<float>(i % 13 - 6) * 0.03125F; }

/// Gradient of an element from its weight, rounded after each operation.
float gradient(tandem::bf16 weight, std::int64_t i, int micro) {
  const float half = tandem::numerics::bf16_to_float(weight) * 0.5F;
  return half + static_cast<float>(i % 7 - 3 + micro) * 0.125F;
}

void fill(tandem::TensorView weights, tandem::TensorView gradients, int micro) {
  const auto* const from = weights.as<tandem::bf16>();
  for (std::int64_t i = 0; i < weights.count(); ++i) {
    if (gradients.dtype == tandem::DType::f32) {
      gradients.as<float>()[i] += gradient(from[i], i, micro);
    } else {
      gradients.as<tandem::bf16>()[i] = tandem::numerics::round_to_bf16(gradient(from[i], i, micro));
    }
  }
}

void backward(tandem::Device& device, tandem::OffloadEngine& engine, tandem::StreamView stream, int i, int micro) {
  const auto weights = engine.fetch(i, stream);
  auto gradients = engine.gradients(i, stream);
  for (const tandem::Parameter& parameter : engine.layout().layer(i).parameters) {
    const tandem::TensorView w = weights[parameter.name];
    const tandem::TensorView g = gradients[parameter.name];
    if (g) tandem::enqueue_host(device, stream, "backward", [w, g, micro] { fill(w, g, micro); });
  }
  gradients.commit(stream);
}

std::string train(const std::string& policy) {
  const auto device = tandem::open_device("host", {.memory = 32_MiB, .threads = 1, .update_threads = 1});
  const tandem::ParameterLayout layout = make_layout();
  tandem::OffloadOptions options;
  options.device_memory = 1_MiB;
  options.policy = tandem::parse_policy(policy);
  options.subgroup_size = 1024;
  options.max_micro_batches = micro_batches;
  const tandem::Plan plan = tandem::make_plan(layout, options, tandem::profile_of(*device));
  tandem::OffloadEngine engine(*device, layout, options, plan);
  engine.initialize([](const tandem::Parameter&, std::span<float> values) {
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = start(static_cast<std::int64_t>(i));
  });
  const tandem::Stream stream = device->make_stream("compute");
  for (int step = 0; step < steps; ++step) {
    engine.begin_step({.lr = 1e-2, .max_grad_norm = 1.0, .micro_batches = micro_batches});
    for (int micro = 0; micro < micro_batches; ++micro) {
      for (int i = 0; i < layout.layer_count(); ++i) static_cast<void>(engine.fetch(i, stream));
      for (int i = layout.layer_count() - 1; i >= 0; --i) backward(*device, engine, stream, i, micro);
    }
    engine.end_step();
  }
  device->synchronize(stream);
  return engine.state_digest();
}

}  // namespace

int main(int count, char** arguments) {
  for (int i = 1; i < count; ++i) std::cout << train(arguments[i]) << '\n';
}
