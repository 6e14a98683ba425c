#pragma once
// Tokens, targets and losses of micro-batches in host memory, where copies to and from the device find them.
#include <cstddef>
#include <cstdint>
#include <span>

#include "models/transformer/transformer.hpp"

namespace tandem {

/// One micro-batch, (B T) each.
struct HostBatch {
  std::span<std::int32_t> tokens;
  std::span<std::int32_t> targets;
  std::span<float> losses;
};

/// Bytes of the batches of `slots` micro-batches.
std::size_t host_batch_bytes(const RunShape& shape, std::size_t slots);
/// The batch of a slot, in memory of host_batch_bytes() that is not owned.
HostBatch host_batch_in(void* memory, const RunShape& shape, std::size_t slot);

}  // namespace tandem
