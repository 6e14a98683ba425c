#include "cpu_ops/update/undo_block.hpp"

#include <cstring>

#include "cpu_ops/update/undo_kernels.hpp"

namespace tandem::kernels {
namespace {

std::int64_t record(Isa isa, const UndoBlock& block, EscapeLists& lists) {
  switch (isa) {
    case Isa::avx512:
      return record_avx512(block, lists);
    case Isa::avx2:
      return record_avx2(block, lists);
    case Isa::scalar:
      break;
  }
  return record_scalar(block, lists);
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

/// Keeps the exponents of coded moments, those of m before those of v.
void keep_exponents(const AdamPiece& block, std::uint8_t* exponents) {
  if (block.format != StateFormat::byte_moments) return;
  for (void* moment : {block.state.m, block.state.v}) {
    for (std::int64_t i = 0; i < layout_quantum; i += coded_block) *exponents++ = *coded_block_at(moment, i).exponent;
  }
}

/// Writes a list to the pool, the lowest bytes of each entry. Returns where it ends.
template <class Word>
std::byte* write(std::byte* pool, const EscapeList& list) {
  for (std::int64_t i = 0; i < list.count; ++i, pool += sizeof(Word)) {
    const Word stored = static_cast<Word>(list.bits[i]);
    std::memcpy(pool, &stored, sizeof stored);
  }
  return pool;
}
template <class Word>
const std::byte* read(const std::byte* pool, std::int64_t count, EscapeList& list) {
  list.count = count;
  for (std::int64_t i = 0; i < count; ++i, pool += sizeof(Word)) {
    Word stored;
    std::memcpy(&stored, pool, sizeof stored);
    list.bits[i] = stored;
  }
  return pool;
}

void write_lists(const AdamPiece& block, std::byte* pool, const EscapeLists& lists) {
  with_adamw_format(block, [&]<StateFormat format>(Format<format>) {
    using Word = typename MomentWord<format>::type;
    write<std::uint32_t>(write<Word>(write<Word>(pool, lists.m), lists.v), lists.master);
  });
}
void read_lists(const AdamPiece& block, const std::byte* pool, const UndoCounts& counts, EscapeLists& lists) {
  with_adamw_format(block, [&]<StateFormat format>(Format<format>) {
    using Word = typename MomentWord<format>::type;
    read<std::uint32_t>(read<Word>(read<Word>(pool, counts.m, lists.m), counts.v, lists.v), counts.master,
                        lists.master);
  });
}

UndoCounts counts_of(const EscapeLists& lists) {
  return {.m = static_cast<std::uint16_t>(lists.m.count),
          .v = static_cast<std::uint16_t>(lists.v.count),
          .master = static_cast<std::uint16_t>(lists.master.count),
          .updated = 1};
}

}  // namespace

bool update_block(Isa isa, const AdamPiece& piece, const AdamCoefficients& c, const AdamInverse& inverse,
                  const UndoRun& run, std::int64_t index, std::size_t offset) {
  const UndoBlock block{piece, c, inverse, run.codes(index), run.kept(index), run.exponents(index)};
  keep_exponents(piece, run.exponents(index));
  EscapeLists lists;
  const std::int64_t updated = record(isa, block, lists);
  const UndoCounts counts = counts_of(lists);
  const bool stays = updated == layout_quantum && offset + run.bytes_of(counts) <= run.pool_bytes();
  if (stays) {
    write_lists(piece, run.pool() + offset, lists);
  } else {
    restore(isa, block, lists, updated);
  }
  run.counts(index) = stays ? counts : UndoCounts{};
  return stays;
}

void take_back(Isa isa, const AdamPiece& piece, const AdamCoefficients& c, const AdamInverse& inverse,
               const UndoRun& run, std::int64_t index, std::size_t offset) {
  const UndoBlock block{piece, c, inverse, run.codes(index), run.kept(index), run.exponents(index)};
  EscapeLists lists;
  read_lists(piece, run.pool() + offset, run.counts(index), lists);
  restore(isa, block, lists, layout_quantum);
}

}  // namespace tandem::kernels
