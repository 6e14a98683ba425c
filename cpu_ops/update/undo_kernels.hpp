#pragma once
// AdamW on a block of `layout_quantum` elements with the record that takes it back (core/numerics/undo.hpp), for one
// instruction set and one thread each. All give the same bits and the same record.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/base/error.hpp"
#include "core/numerics/undo_rounded.hpp"
#include "core/ops/undo_record.hpp"

namespace tandem::kernels {

/// Elements that are updated or left alone together: those that share the exponents of coded moments.
constexpr std::int64_t undo_group = coded_block;
constexpr std::int64_t undo_groups = layout_quantum / undo_group;

/// Old bits that codes do not give back, in the order of their elements.
struct EscapeList {
  static constexpr int slack = 16;  ///< vectors are written and read whole
  std::int64_t count = 0;
  alignas(64) std::uint32_t bits[layout_quantum + slack];
};
struct EscapeLists {
  EscapeList m, v, master;
};

/// A rounded moment of a block before its update, as it was stored, and which elements are not found from the new ones:
/// a bit for each, 64 a word.
struct OldMoment {
  template <class Word>
  Word* words() noexcept {
    return reinterpret_cast<Word*>(stored);
  }
  template <class Word>
  const Word* words() const noexcept {
    return reinterpret_cast<const Word*>(stored);
  }
  /// Appends lost elements, of the first bits of `bits`, from element `i` on, a multiple of their number.
  template <class Bits>
  void set_lost(std::int64_t i, Bits bits) noexcept {
    std::memcpy(reinterpret_cast<std::byte*>(lost) + i / 8, &bits, sizeof bits);
  }
  alignas(64) std::uint64_t lost[undo_groups] = {};
  alignas(64) std::byte stored[layout_quantum * sizeof(std::uint16_t)];
};

/// Old state that the codes of a block do not give back: masters, and moments in fp32 or rounded.
struct Unfound {
  EscapeLists lists;
  OldMoment m, v;
};

/// The entry of a list of rounded moments: no code says that one is there, so that it has the index of its element.
constexpr int entry_index = 16;  ///< its lowest bit; the old bits are below
inline std::uint32_t escape_entry(std::int64_t i, std::uint32_t bits) {
  return static_cast<std::uint32_t>(i) << entry_index | bits;
}
/// Entries of rounded moments that are still to be read.
class EscapeEntries {
 public:
  explicit EscapeEntries(const EscapeList& list) : next_(list.bits), end_(list.bits + list.count) {}
  /// Puts those of elements before `end` in their places; `words` are of elements from `first` on.
  template <class Word>
  void insert(Word* words, std::int64_t first, std::int64_t end) {
    constexpr std::uint32_t mask = (1u << entry_index) - 1;
    for (; next_ != end_ && *next_ >> entry_index < static_cast<std::uint32_t>(end); ++next_) {
      words[static_cast<std::int64_t>(*next_ >> entry_index) - first] = static_cast<Word>(*next_ & mask);
    }
  }

 private:
  const std::uint32_t *next_, *end_;
};
/// Operands, not owned; the piece is of one block and of a format of AdamW.
struct UndoBlock {
  const AdamPiece& piece;
  const AdamCoefficients& c;  ///< coefficients of the update
  const AdamInverse& inverse;
  std::uint8_t* codes;  ///< a code for each element, aligned to 64 bytes
  const std::uint8_t*
      exponents;  ///< old ones of coded moments, exponent_of_zeros among them: those of m before those of v
};

/// Updates a block, writes its codes, and what they do not give back. Returns how many elements from the
/// first on that were: all, or those before the group, or half of it, that would have a NaN afterwards.
std::int64_t record_scalar(const UndoBlock& block, Unfound& old);
std::int64_t record_avx2(const UndoBlock& block, Unfound& old);
std::int64_t record_avx512(const UndoBlock& block, Unfound& old);

/// Makes of the first `count` elements, as many as record_*() of the instruction set updated, what they were.
void restore_scalar(const UndoBlock& block, const EscapeLists& lists, std::int64_t count);
void restore_avx2(const UndoBlock& block, const EscapeLists& lists, std::int64_t count);
void restore_avx512(const UndoBlock& block, const EscapeLists& lists, std::int64_t count);

/// Calls body(Format) for the format of a piece, which must be one of AdamW.
template <class Body>
void with_adamw_format(const AdamPiece& piece, const Body& body) {
  with_format(piece.format, [&]<StateFormat format>(Format<format> f) {
    if constexpr (is_lion(format)) {
      throw MisuseError("an update of Lion that may be taken back");
    } else {
      body(f);
    }
  });
}

/// A moment as it is stored.
template <StateFormat format>
using MomentWord =
    std::conditional_t<format == StateFormat::bf16_moments, std::uint16_t,
                       std::conditional_t<format == StateFormat::byte_moments, std::uint8_t, std::uint32_t>>;

/// Moments from element `i` on, which begins a group.
template <StateFormat format>
MomentWord<format>* moments_at(void* array, std::int64_t i) {
  if constexpr (format == StateFormat::byte_moments) {
    return coded_block_at(array, i).codes;
  } else {
    return static_cast<MomentWord<format>*>(array) + i;
  }
}

/// Exponents of coded moments of a group, in other formats 0.
struct Exponents {
  std::uint32_t m = 0;
  std::uint32_t v = 0;
};
template <StateFormat format>
Exponents exponents_of(const AdamPiece& p, std::int64_t first) {
  if constexpr (format != StateFormat::byte_moments) return {};
  return {*coded_block_at(p.state.m, first).exponent, *coded_block_at(p.state.v, first).exponent};
}
/// Exponents as they were kept.
template <StateFormat format>
Exponents old_exponents(const UndoBlock& block, std::int64_t first) {
  if constexpr (format != StateFormat::byte_moments) return {};
  return {block.exponents[first / undo_group], block.exponents[undo_groups + first / undo_group]};
}
/// The exponents that kept ones stand for.
inline Exponents exponents_kept(Exponents kept) {
  const auto of = [](std::uint32_t e, std::uint32_t least) { return e == numerics::exponent_of_zeros ? least : e; };
  return {of(kept.m, numerics::least_m_exponent), of(kept.v, numerics::least_v_exponent)};
}
template <StateFormat format>
void store_exponents(const AdamPiece& p, std::int64_t first, Exponents e) {
  if constexpr (format == StateFormat::byte_moments) {
    *coded_block_at(p.state.m, first).exponent = static_cast<std::uint8_t>(e.m);
    *coded_block_at(p.state.v, first).exponent = static_cast<std::uint8_t>(e.v);
  }
}
/// Codes by which moments of a group may have grown and are found.
inline std::int32_t m_reach(const AdamInverse& inverse, Exponents before, Exponents after) {
  return numerics::code_reach(before.m, after.m, inverse.m_octaves, numerics::most_m_exponent);
}
inline std::int32_t v_reach(const AdamInverse& inverse, Exponents before, Exponents after) {
  return numerics::code_reach(before.v, after.v, inverse.v_octaves, numerics::most_v_exponent);
}

/// Brings the group from element `first` on nearer.
template <StateFormat format>
void prefetch_group(const AdamPiece& p, std::int64_t first) {
  constexpr std::size_t moments = format == StateFormat::byte_moments ? undo_group : m_bytes(format, undo_group);
  const auto bring = [](const void* array, std::size_t offset, std::size_t bytes) {
    const auto* const at = static_cast<const char*>(array) + offset;
    for (std::size_t line = 0; line < bytes; line += 64) __builtin_prefetch(at + line);
  };
  bring(moments_at<format>(p.state.m, first), 0, moments);
  bring(moments_at<format>(p.state.v, first), 0, moments);
  if constexpr (has_fp32_weights(format)) {
    bring(p.fp32_weight, weight_bytes(format, first), weight_bytes(format, undo_group));
    bring(p.fp32_gradient, gradient_bytes(format, first), gradient_bytes(format, undo_group));
  } else {
    bring(p.state.master, master_bytes(format, first), master_bytes(format, undo_group));
    bring(p.weight, weight_bytes(format, first), weight_bytes(format, undo_group));
    bring(p.gradient, gradient_bytes(format, first), gradient_bytes(format, undo_group));
  }
}

}  // namespace tandem::kernels
