#pragma once
// Tokens, targets, records and losses of micro-batches in host memory, where copies to and from the device find them.
#include <cstddef>
#include <cstdint>
#include <span>

#include "data/window_sampler.hpp"
#include "models/transformer/transformer.hpp"

namespace tandem {

/// One micro-batch, (B T) each.
struct HostBatch {
  std::span<std::int32_t> tokens;
  std::span<std::int32_t> targets;
  std::span<float> losses;
  std::span<std::int32_t> record_first;  ///< RecordsView::first of a packed shape; else empty
  std::span<std::int32_t> record_end;
  std::span<std::int32_t> cache_first;  ///< a cached shape's, as Transformer::decode has it; else empty
  std::span<std::int32_t> cache_rows;
  std::span<float> reference{};  ///< (B), of a shape of preferences; else empty
  std::span<float> pairs{};      ///< (B / 2, 3), likewise: loss and rewards of each pair

  /// Room for the `index`th window of `length` tokens.
  WindowView window(std::size_t index, std::size_t length) const;
};

/// Bytes of the batches of `slots` micro-batches.
std::size_t host_batch_bytes(const RunShape& shape, std::size_t slots);
/// The batch of a slot, in memory of host_batch_bytes() that is not owned.
HostBatch host_batch_in(void* memory, const RunShape& shape, std::size_t slot);

}  // namespace tandem
