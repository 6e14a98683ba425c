#pragma once
// A run's own device memory: which buffers there are, and which share their place. See docs/models.md for
// the sizes.
#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "core/memory/carver.hpp"
#include "models/transformer/block.hpp"
#include "models/transformer/reference_adapters.hpp"
#include "models/transformer/transformer.hpp"

namespace tandem {

/// Rows of the memory plan, each carved on its own.
struct ActivationRows {
  Carver batch;                     ///< tokens, targets, records, losses
  Carver kept;                      ///< values kept between forward and backward
  Carver workspace;                 ///< buffers and scratch of the ops within one block, or within the head
  Carver tables;                    ///< constants
  Carver cache;                     ///< keys and values of a cached shape
  Carver reference;                 ///< adapters of the reference
  std::size_t offloaded_bytes = 0;  ///< on the host: inputs that do not stay
};

/// Facts about the ops on which the sizes of buffers depend.
struct OpsNeeds {
  std::size_t block_scratch = 0;  ///< bytes that a block's calls ask for
  std::size_t ends_scratch = 0;   ///< bytes that calls of embedding and head ask for, where the vocabulary counts
  bool repeats_gelu = true;       ///< Ops::repeats_gelu
  Fp8Sizes fp8{};
};

/// Buffers of one micro-batch, of those kept at once.
struct MicroBatch {
  TensorView tokens, targets;  ///< (B, T) i32
  TensorView record_first;     ///< (B, T) i32, of a packed shape: where each token's record begins
  TensorView record_end;       ///< (B, T) i32, of a packed shape: one past the last token of each token's record
  TensorView cache_rows;       ///< (B, T) i32, of a cached shape: row of each token's sequence
  TensorView losses;           ///< (N) f32
  TensorView reference;        ///< (B) f32, of a shape of preferences: log-probabilities under the reference
  TensorView factors;          ///< (B) f32, likewise: factors of the gradients of each sequence's losses
  TensorView pairs;            ///< (B / 2, 3) f32, likewise: loss and rewards
  TensorView normed;           ///< (N, C): the head's normalised input, later the gradient that runs backward
  TensorView token_rows;       ///< (N, C) f32 or empty: rows of a tied table's gradient, before the embedding's part
  TensorView head_input;       ///< (N, C) or empty: the head's normalised input, where makes_table_last()
  std::uint64_t draw = 0;      ///< its number among all that the run trains

  RecordsView records() const {
    if (!record_end) return {};
    return {record_first.as<std::int32_t>(), record_end.as<std::int32_t>()};
  }
};

struct Activations {
  std::vector<MicroBatch> micro;
  std::vector<TensorView> inputs;     ///< (N, C): slots for the inputs of each block and of the head
  TensorView mean, rstd;              ///< (N) f32, of the head's norm
  TensorView dnormed;                 ///< (N, C): gradient of `normed`
  TensorView logits;                  ///< (1, V) f32, of a cached shape (B, V)
  std::vector<KeyValueCache> caches;  ///< a cached shape's, one for each block
  TensorView block_scratch;           ///< lent to the ops while they work for a block
  TensorView ends_scratch;            ///< and for embedding and head
  std::optional<Fp8Buffers> fp8;      ///< in a shape with eight-bit products
  std::optional<ReferenceAdapters> reference;  ///< adapters of the reference, in a shape that has them
  std::unique_ptr<Block> block;
};

/// How many of the last blocks keep their buffers from forward to backward.
std::int64_t kept_blocks(const ModelConfig& config, const RunShape& shape) noexcept;
/// Whether those keep only some, and share the others.
bool keeps_selectively(const ModelConfig& config, const RunShape& shape) noexcept;

/// Takes everything that a run of this shape needs. Measures where the rows have no memory.
Activations take_activations(const ModelConfig& config, const RunShape& shape, const OpsNeeds& ops,
                             ActivationRows& rows);

}  // namespace tandem
