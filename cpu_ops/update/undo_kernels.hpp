#pragma once
// AdamW on a block of `layout_quantum` elements with the record that takes it back (core/numerics/undo.hpp), for one
// instruction set and one thread each. All give the same bits and the same record.
#include <cstdint>

#include "core/base/error.hpp"
#include "core/numerics/undo.hpp"
#include "core/ops/undo_record.hpp"

namespace tandem::kernels {

/// Elements that are updated or left alone together: those that share the exponents of coded moments.
constexpr std::int64_t undo_group = coded_block;
constexpr std::int64_t undo_groups = layout_quantum / undo_group;

/// Old bits that do not fit their codes, in the order of their elements.
struct EscapeList {
  static constexpr int slack = 16;  ///< vectors are written and read whole
  std::int64_t count = 0;
  alignas(64) std::uint32_t bits[layout_quantum + slack];
};
struct EscapeLists {
  EscapeList m, v, master;
};

/// Operands, not owned; the piece is of one block and of a format of AdamW.
struct UndoBlock {
  const AdamPiece& piece;
  const AdamCoefficients& c;  ///< coefficients of the update
  const AdamInverse& inverse;
  std::uint8_t* codes;            ///< a code for each element, aligned to 64 bytes
  std::uint8_t* old_m;            ///< old codes of m where it is coded, aligned as these
  const std::uint8_t* exponents;  ///< old ones of coded moments: those of m before those of v
};

/// Updates a block, writes its codes, and appends to the lists, which are empty. Returns how many elements from the
/// first on that were: all, or those before the first group that has a NaN afterwards.
std::int64_t record_scalar(const UndoBlock& block, EscapeLists& lists);
std::int64_t record_avx2(const UndoBlock& block, EscapeLists& lists);
std::int64_t record_avx512(const UndoBlock& block, EscapeLists& lists);

/// Makes of the first `count` elements, whole groups, what they were.
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
struct MomentWord {
  using type = std::uint32_t;
};
template <>
struct MomentWord<StateFormat::bf16_moments> {
  using type = std::uint16_t;
};
template <>
struct MomentWord<StateFormat::byte_moments> {
  using type = std::uint8_t;
};

/// Moments from element `i` on, which begins a group.
template <StateFormat format>
typename MomentWord<format>::type* moments_at(void* array, std::int64_t i) {
  if constexpr (format == StateFormat::byte_moments) {
    return coded_block_at(array, i).codes;
  } else {
    return static_cast<typename MomentWord<format>::type*>(array) + i;
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
template <StateFormat format>
Exponents old_exponents(const UndoBlock& block, std::int64_t first) {
  if constexpr (format != StateFormat::byte_moments) return {};
  return {block.exponents[first / undo_group], block.exponents[undo_groups + first / undo_group]};
}
template <StateFormat format>
void store_exponents(const AdamPiece& p, std::int64_t first, Exponents e) {
  if constexpr (format == StateFormat::byte_moments) {
    *coded_block_at(p.state.m, first).exponent = static_cast<std::uint8_t>(e.m);
    *coded_block_at(p.state.v, first).exponent = static_cast<std::uint8_t>(e.v);
  }
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
