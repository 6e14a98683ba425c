#include "models/transformer/activations.hpp"

#include <algorithm>

#include "models/transformer/input_store.hpp"

namespace tandem {
namespace {

struct Taker {
  const ModelConfig& config;
  const RunShape& shape;
  std::int64_t tokens;

  TensorView stream(Carver& carver) const { return carver.take(shape.compute, {tokens, config.width}); }

  void take_batches(Carver& carver, Activations& a) const {
    for (std::int64_t i = 0; i < shape.micro_batches; ++i) {
      MicroBatch& micro = a.micro.emplace_back();
      micro.tokens = carver.take(DType::i32, {shape.batch, shape.sequence});
      micro.targets = carver.take(DType::i32, {shape.batch, shape.sequence});
      if (shape.packed) {
        micro.record_first = carver.take(DType::i32, {shape.batch, shape.sequence});
        micro.record_end = carver.take(DType::i32, {shape.batch, shape.sequence});
      }
      if (shape.cached > 0) {
        micro.record_first = carver.take(DType::i32, {shape.batch, shape.sequence});
        micro.cache_rows = carver.take(DType::i32, {shape.batch, shape.sequence});
      }
      micro.losses = carver.take(DType::f32, {tokens});
      if (shape.preference_beta > 0.0F) {
        micro.reference = carver.take(DType::f32, {shape.batch});
        micro.factors = carver.take(DType::f32, {shape.batch});
        micro.pairs = carver.take(DType::f32, {shape.batch / 2, 3});
      }
    }
  }

  void take_caches(Carver& carver, Activations& a) const {
    if (shape.cached == 0) return;
    const Shape rows{shape.batch, shape.cached, config.kv_heads * config.head_dim};
    for (std::int64_t i = 0; i < config.layers; ++i) {
      a.caches.push_back({carver.take(shape.compute, rows), carver.take(shape.compute, rows)});
    }
  }

  void take_normed(Carver& carver, Activations& a) const {
    for (MicroBatch& micro : a.micro) {
      micro.normed = shape.cached > 0 ? carver.take(shape.compute, {shape.batch, config.width}) : stream(carver);
    }
  }

  /// Takes buffers for a tied table's gradient: the head's inputs where it is made last, and otherwise the rows that
  /// wait for the embedding.
  void take_for_the_table(Carver& carver, Activations& a) const {
    const bool last = makes_table_last(config, shape);
    for (MicroBatch& micro : a.micro) {
      if (last) micro.head_input = stream(carver);
      if (!last && has_token_rows()) micro.token_rows = carver.take(DType::f32, {tokens, config.width});
    }
  }

  /// Made last, one serves all micro-batches.
  void take_token_rows(Carver& carver, Activations& a) const {
    if (!makes_table_last(config, shape) || !has_token_rows()) return;
    const TensorView rows = carver.take(DType::f32, {tokens, config.width});
    for (MicroBatch& micro : a.micro) micro.token_rows = rows;
  }

  bool has_token_rows() const { return config.tied_head && ends_gradient(config, shape) == DType::bf16; }

  void take_statistics(Carver& carver, Activations& a) const {
    a.mean = carver.take(DType::f32, {tokens});
    a.rstd = carver.take(DType::f32, {tokens});
  }

  /// The head needs its gradient only in training, logits only without.
  void take_head_buffers(Carver& carver, Activations& a) const {
    if (!shape.training) take_normed(carver, a);
    const auto gradient = [&] {
      if (shape.training) a.dnormed = stream(carver);
    };
    const std::int64_t rows = shape.cached > 0 ? shape.batch : 1;
    const auto logits = [&] { a.logits = carver.take(DType::f32, {rows, config.vocabulary}); };
    carver.overlay(gradient, logits);
  }

  void take_inputs(Carver& carver, Activations& a) const {
    const auto at_once = static_cast<std::size_t>(shape.micro_batches);
    const std::size_t all = (static_cast<std::size_t>(config.layers) + 1) * at_once;
    std::size_t count = shape.training ? all : 2;
    if (shape.offload_inputs) count = std::min(count, InputStore::ring(at_once));
    for (std::size_t i = 0; i < count; ++i) a.inputs.push_back(stream(carver));
  }
};

TensorView raw(Carver& carver, std::size_t bytes) {
  return carver.take(DType::f32, {static_cast<std::int64_t>(align_up(bytes) / sizeof(float))});
}

}  // namespace

std::int64_t kept_blocks(const ModelConfig& config, const RunShape& shape) noexcept {
  return shape.training ? config.layers - shape.recomputed_blocks : 0;
}

bool keeps_selectively(const ModelConfig& config, const RunShape& shape) noexcept {
  return shape.selective && kept_blocks(config, shape) > 0;
}

Activations take_activations(const ModelConfig& config, const RunShape& shape, const OpsNeeds& ops,
                             ActivationRows& rows) {
  const Taker taker{config, shape, shape.batch * shape.sequence};
  Activations a;
  RunShape of_block = shape;
  of_block.selective = keeps_selectively(config, shape);
  if (shape.cached > 0) of_block.batch = 1, of_block.sequence = most_cached_tokens(shape);
  a.block = make_block(config, of_block, ops.repeats_gelu);
  a.block->take_tables(rows.tables);
  taker.take_caches(rows.cache, a);
  taker.take_batches(rows.batch, a);
  if (shape.reference_adapters) a.reference.emplace(config, rows.reference);
  taker.take_inputs(shape.training ? rows.kept : rows.workspace, a);
  if (shape.training) {
    const auto all = static_cast<std::size_t>((config.layers + 1) * shape.micro_batches);
    rows.offloaded_bytes = InputStore::host_bytes(a.inputs.size(), all, a.inputs.front().bytes());
  }
  taker.take_statistics(rows.workspace, a);
  if (shape.training) {
    taker.take_normed(rows.workspace, a);
    taker.take_for_the_table(rows.kept, a);
  }
  const std::int64_t kept = kept_blocks(config, shape) * shape.micro_batches;
  // While a block is at work, embedding and head are not.
  const auto block = [&] {
    a.block->take_shared(rows.workspace);
    a.fp8 = take_fp8(rows.workspace, ops.fp8, shape);
    const auto take_slot = [&](Carver& carver) {
      a.block->take_buffers(carver);
      take_magnitudes(carver, ops.fp8, a.fp8);
    };
    for (std::int64_t i = 0; i < kept; ++i) take_slot(rows.kept);
    if (kept == 0) take_slot(rows.workspace);
    a.block_scratch = raw(rows.workspace, ops.block_scratch);
  };
  const auto ends = [&] {
    taker.take_head_buffers(rows.workspace, a);
    if (shape.training) taker.take_token_rows(rows.workspace, a);
    a.ends_scratch = raw(rows.workspace, ops.ends_scratch);
  };
  rows.workspace.overlay(block, ends);
  return a;
}

}  // namespace tandem
