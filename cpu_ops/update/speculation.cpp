#include "cpu_ops/update/speculation.hpp"

#include <cmath>

#include "cpu_ops/update/undo_block.hpp"
#include "cpu_ops/update/undo_kernels.hpp"

namespace tandem::kernels {
namespace {

AdamPiece block_of(const AdamPiece& piece, std::int64_t block) {
  AdamPiece part = piece.from(block * layout_quantum);
  part.count = layout_quantum;
  return part;
}

/// Whether coded moments of a block hold a NaN, which has no estimate.
bool holds_nan(const AdamPiece& block) {
  if (block.format != StateFormat::byte_moments) return false;
  const std::uint8_t *const m = coded_block_at(block.state.m, 0).exponent, *const v = coded_block_at(block.state.v, 0)
                                                                                          .exponent;
  bool nan = false;  // no early end: all are compared at once
  for (std::int64_t g = 0; g < undo_groups; ++g) {
    nan |= m[g] == numerics::exponent_of_nan || v[g] == numerics::exponent_of_nan;
  }
  return nan;
}

}  // namespace

std::int64_t speculate(Isa isa, const RunPiece& p, const AdamCoefficients& c) {
  const AdamInverse inverse = numerics::adam_inverse(c);
  const std::int64_t blocks = p.piece.count / layout_quantum;
  std::size_t offset = p.run.pool_offset(p.first);
  std::int64_t updated = 0;
  for (std::int64_t b = 0; b < blocks; ++b) {
    const AdamPiece block = block_of(p.piece, b);
    p.run.counts(p.first + b) = {};
    if (!std::isfinite(p.block_norms[p.first + b]) || holds_nan(block)) continue;
    if (!update_block(isa, block, c, inverse, p.run, p.first + b, offset)) continue;
    offset += p.run.bytes_of(p.run.counts(p.first + b));
    updated += layout_quantum;
  }
  return updated;
}

void settle(Isa isa, const RunPiece& p, const AdamCoefficients& speculated, const AdamCoefficients& actual,
            Settling settling) {
  const AdamInverse inverse = numerics::adam_inverse(speculated);
  const std::int64_t blocks = p.piece.count / layout_quantum;
  std::size_t offset = p.run.pool_offset(p.first);
  for (std::int64_t b = 0; b < blocks; ++b) {
    const AdamPiece block = block_of(p.piece, b);
    UndoCounts& counts = p.run.counts(p.first + b);
    const bool updated = counts.updated != 0;
    if (updated && settling != Settling::confirm) {
      take_back(isa, block, speculated, inverse, p.run, p.first + b, offset);
    }
    offset += p.run.bytes_of(counts);
    counts.updated = 0;
    const bool stays = settling == Settling::retract || (settling == Settling::confirm && updated);
    if (!stays) adamw_dispatched(isa, block, actual);
  }
}

}  // namespace tandem::kernels
