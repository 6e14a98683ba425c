#include "train/setup/host_batch.hpp"

#include "core/memory/memory.hpp"

namespace tandem {
namespace {

/// Tokens, targets and losses, and where records begin and end, or sequences begin and lie in a cache.
std::size_t parts_of_tokens(const RunShape& shape) { return shape.packed || shape.cached > 0 ? 5 : 3; }

/// Parts of all kinds; the reference of pairs has one, and their losses and rewards two, also of sequences of one
/// token.
std::size_t parts_of(const RunShape& shape) { return parts_of_tokens(shape) + (shape.preference_beta > 0.0F ? 3 : 0); }

std::size_t values_of(const RunShape& shape) { return static_cast<std::size_t>(shape.batch * shape.sequence); }

std::size_t part_bytes(const RunShape& shape) { return align_up(values_of(shape) * sizeof(std::int32_t)); }

}  // namespace

std::size_t host_batch_bytes(const RunShape& shape, std::size_t slots) {
  return slots * parts_of(shape) * part_bytes(shape);
}

HostBatch host_batch_in(void* memory, const RunShape& shape, std::size_t slot) {
  auto* const base = static_cast<std::byte*>(memory) + host_batch_bytes(shape, slot);
  const std::size_t count = values_of(shape);
  const auto part = [&](std::size_t i) {
    return std::span(reinterpret_cast<std::int32_t*>(base + i * part_bytes(shape)), count);
  };
  HostBatch batch{part(0), part(1), {reinterpret_cast<float*>(part(2).data()), count}, {}, {}, {}, {}, {}, {}};
  if (shape.packed) batch.record_first = part(3), batch.record_end = part(4);
  if (shape.cached > 0) batch.cache_first = part(3), batch.cache_rows = part(4);
  if (shape.preference_beta > 0.0F) {
    const std::size_t first = parts_of_tokens(shape);
    const auto sequences = static_cast<std::size_t>(shape.batch);
    const auto floats = [&](std::size_t i) { return reinterpret_cast<float*>(part(i).data()); };
    batch.reference = {floats(first), sequences};
    batch.pairs = {floats(first + 1), 3 * (sequences / 2)};
  }
  return batch;
}

WindowView HostBatch::window(std::size_t index, std::size_t length) const {
  const auto part = [&](std::span<std::int32_t> all) {
    return all.empty() ? all : all.subspan(index * length, length);
  };
  return {part(tokens), part(targets), part(record_first), part(record_end)};
}

}  // namespace tandem
