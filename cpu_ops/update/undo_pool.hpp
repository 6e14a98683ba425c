#pragma once
// Old state that the codes of a block do not give back, as the pool of its run has it: m, v and masters, in the order
// of their elements.
#include "core/host/isa.hpp"
#include "cpu_ops/update/undo_entries.hpp"
#include "cpu_ops/update/undo_kernels.hpp"

namespace tandem::kernels {

/// Old state of a block on its way to the pool, of which vectors are written whole.
struct PoolBytes {
  std::byte bytes[3 * layout_quantum * sizeof(std::uint32_t)];
};
// Entries of rounded moments have at most 3 bytes, masters 4.
static_assert(layout_quantum * (3 + 3 + sizeof(std::uint32_t)) + entries_slack <= sizeof(PoolBytes));

/// Writes what a block's update left, the same under every instruction set. Returns how many entries that are.
UndoCounts write_pool(Isa isa, const AdamPiece& block, const Unfound& old, PoolBytes& pool);

/// Reads as many entries as `counts` says.
void read_pool(const AdamPiece& block, const std::byte* pool, const UndoCounts& counts, EscapeLists& lists);

}  // namespace tandem::kernels
