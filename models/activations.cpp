#include "models/activations.hpp"

#include <algorithm>

#include "models/input_store.hpp"

namespace tandem {
namespace {

struct Taker {
  const ModelConfig& config;
  const RunShape& shape;
  std::int64_t tokens;

  TensorView stream(Carver& carver) const { return carver.take(shape.compute, {tokens, config.width}); }

  void take_batch(Carver& carver, Activations& a) const {
    a.tokens = carver.take(DType::i32, {shape.batch, shape.sequence});
    a.targets = carver.take(DType::i32, {shape.batch, shape.sequence});
    a.losses = carver.take(DType::f32, {tokens});
  }

  void take_statistics(Carver& carver, Activations& a) const {
    a.mean = carver.take(DType::f32, {tokens});
    a.rstd = carver.take(DType::f32, {tokens});
  }

  /// The head needs its gradient only in training, logits only without.
  void take_head_buffers(Carver& carver, Activations& a) const {
    if (!shape.training) a.normed = stream(carver);
    const auto gradient = [&] {
      if (shape.training) a.dnormed = stream(carver);
    };
    const auto logits = [&] { a.logits = carver.take(DType::f32, {1, config.vocabulary}); };
    carver.overlay(gradient, logits);
  }

  void take_inputs(Carver& carver, Activations& a) const {
    const auto all = static_cast<std::size_t>(config.layers) + 1;
    std::size_t count = shape.training ? all : 2;
    if (shape.offload_inputs) count = std::min(count, InputStore::ring);
    for (std::size_t i = 0; i < count; ++i) a.inputs.push_back(stream(carver));
  }
};

TensorView raw(Carver& carver, std::size_t bytes) {
  return carver.take(DType::f32, {static_cast<std::int64_t>(align_up(bytes) / sizeof(float))});
}

}  // namespace

Activations take_activations(const ModelConfig& config, const RunShape& shape, const ScratchBytes& scratch,
                             ActivationRows& rows) {
  const Taker taker{config, shape, shape.batch * shape.sequence};
  Activations a;
  a.block = make_block(config, shape);
  a.block->take_tables(rows.tables);
  taker.take_batch(rows.batch, a);
  taker.take_inputs(shape.training ? rows.kept : rows.workspace, a);
  if (shape.training) {
    rows.offloaded_bytes = InputStore::host_bytes(a.inputs.size(), static_cast<std::size_t>(config.layers),
                                                  a.inputs.front().bytes());
  }
  taker.take_statistics(rows.workspace, a);
  if (shape.training) a.normed = taker.stream(rows.workspace);
  const bool keeps_all = shape.training && !shape.recompute;
  if (keeps_all) a.block_slots = static_cast<std::size_t>(config.layers);
  for (std::size_t i = 0; keeps_all && i < a.block_slots; ++i) a.block->take_buffers(rows.kept);
  // While a block is at work, embedding and head are not.
  const auto block = [&] {
    if (!keeps_all) a.block->take_buffers(rows.workspace);
    a.block_scratch = raw(rows.workspace, scratch.block);
  };
  const auto ends = [&] {
    taker.take_head_buffers(rows.workspace, a);
    a.ends_scratch = raw(rows.workspace, scratch.ends);
  };
  rows.workspace.overlay(block, ends);
  return a;
}

}  // namespace tandem
