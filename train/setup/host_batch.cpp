#include "train/setup/host_batch.hpp"

#include "core/memory/memory.hpp"

namespace tandem {
namespace {

constexpr std::size_t parts = 3;  // tokens, targets, losses

std::size_t values_of(const RunShape& shape) { return static_cast<std::size_t>(shape.batch * shape.sequence); }

std::size_t part_bytes(const RunShape& shape) { return align_up(values_of(shape) * sizeof(std::int32_t)); }

}  // namespace

std::size_t host_batch_bytes(const RunShape& shape, std::size_t slots) { return slots * parts * part_bytes(shape); }

HostBatch host_batch_in(void* memory, const RunShape& shape, std::size_t slot) {
  auto* const base = static_cast<std::byte*>(memory) + host_batch_bytes(shape, slot);
  const auto part = [&](std::size_t i) { return base + i * part_bytes(shape); };
  const std::size_t count = values_of(shape);
  return {{reinterpret_cast<std::int32_t*>(part(0)), count},
          {reinterpret_cast<std::int32_t*>(part(1)), count},
          {reinterpret_cast<float*>(part(2)), count}};
}

}  // namespace tandem
