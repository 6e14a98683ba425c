#include "cpu_ops/update/undo_block.hpp"

#include <algorithm>
#include <cstring>

#include "cpu_ops/update/undo_pool.hpp"

namespace tandem::kernels {
namespace {

std::int64_t record(Isa isa, const UndoBlock& block, Unfound& old) {
  switch (isa) {
    case Isa::avx512:
      return record_avx512(block, old);
    case Isa::avx2:
      return record_avx2(block, old);
    case Isa::scalar:
      break;
  }
  return record_scalar(block, old);
}
void restore(Isa isa, const UndoBlock& block, const EscapeLists& lists, std::int64_t count) {
  switch (isa) {
    case Isa::avx512:
      return restore_avx512(block, lists, count);
    case Isa::avx2:
      return restore_avx2(block, lists, count);
    case Isa::scalar:
      return restore_scalar(block, lists, count);
  }
}

/// Keeps the exponents of a coded moment of a block. Those of groups whose codes are all zero are the least.
void keep_exponents(const CodedBlock& block, std::uint32_t least, std::uint8_t* kept) {
  static_assert(layout_quantum == coded_record, "a block's exponents follow one another");
  std::copy_n(block.exponent, undo_groups, kept);
  bool any = false;  // no early end: all are compared at once
  for (std::int64_t g = 0; g < undo_groups; ++g) any |= kept[g] == least;
  if (!any) return;
  for (std::int64_t g = 0; g < undo_groups; ++g) {
    const std::uint8_t* const codes = block.codes + g * undo_group;
    const bool zeros = std::all_of(codes, codes + undo_group, [](std::uint8_t code) { return code == 0; });
    if (zeros && kept[g] == least) kept[g] = static_cast<std::uint8_t>(numerics::exponent_of_zeros);
  }
}
/// Keeps the exponents of m before those of v.
void keep_exponents(const AdamPiece& block, std::uint8_t* kept) {
  if (block.format != StateFormat::byte_moments) return;
  keep_exponents(coded_block_at(block.state.m, 0), numerics::least_m_exponent, kept);
  keep_exponents(coded_block_at(block.state.v, 0), numerics::least_v_exponent, kept + undo_groups);
}

}  // namespace

bool update_block(Isa isa, const AdamPiece& piece, const AdamCoefficients& c, const AdamInverse& inverse,
                  const UndoRun& run, std::int64_t index, std::size_t offset) {
  const UndoBlock block{piece, c, inverse, run.codes(index), run.exponents(index)};
  keep_exponents(piece, run.exponents(index));
  Unfound old;
  PoolBytes pool;
  const std::int64_t updated = record(isa, block, old);
  const UndoCounts counts = write_pool(isa, piece, old, pool);
  const bool stays = updated == layout_quantum && offset + run.bytes_of(counts) <= run.pool_bytes();
  if (stays) {
    std::memcpy(run.pool() + offset, pool.bytes, run.bytes_of(counts));
  } else {
    read_pool(piece, pool.bytes, counts, old.lists);
    restore(isa, block, old.lists, updated);
  }
  run.counts(index) = stays ? counts : UndoCounts{};
  return stays;
}

void take_back(Isa isa, const AdamPiece& piece, const AdamCoefficients& c, const AdamInverse& inverse,
               const UndoRun& run, std::int64_t index, std::size_t offset) {
  const UndoBlock block{piece, c, inverse, run.codes(index), run.exponents(index)};
  EscapeLists lists;
  read_pool(piece, run.pool() + offset, run.counts(index), lists);
  restore(isa, block, lists, layout_quantum);
}

}  // namespace tandem::kernels
