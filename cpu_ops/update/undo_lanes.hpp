#pragma once
// The kernels of undo_kernels.hpp in vectors, where moments are in fp32, and what all formats share: one text for all
// instruction sets. Included behind what an instruction set gives: the types Floats, Bits (32 bits a lane), Bytes,
// Group, Coefficients, Step and MomentBits, and functions on them.
#include <bit>
#include <type_traits>

#include "cpu_ops/update/undo_kernels.hpp"

namespace tandem::kernels {
namespace {

constexpr int vectors = static_cast<int>(undo_group) / lanes;

/// Constants that all groups of a block share.
struct Constants {
  explicit Constants(const UndoBlock& b)
      : c(b.c),
        random(b.c, first_random_block(b.piece)),
        beta1(every(b.inverse.beta1)),
        beta1_rest(every(b.inverse.beta1_rest)),
        beta2(every(b.inverse.beta2)),
        beta2_rest(every(b.inverse.beta2_rest)),
        undecay(every(b.inverse.undecay)) {}
  Coefficients c;
  MomentBits random;
  Floats beta1, beta1_rest, beta2, beta2_rest, undecay;  ///< see AdamInverse
};

// -- estimates --------------------------------------------------------------------------------------------------

/// numerics::estimate_m and _v of moments in fp32, less what their differences count from.
inline Bits estimate_m(Bits next, Floats g, const Constants& k) {
  const Floats rest = subtract(floats(next), mul(k.c.one_minus_beta1, g));
  return subtract(bits_of(fma(rest, k.beta1, mul(rest, k.beta1_rest))), all(numerics::moment_range));
}
inline Bits estimate_v(Bits next, Floats g, const Constants& k) {
  constexpr std::uint32_t range = numerics::moment_range;
  const Bits least = subtract(next, all(numerics::fp32_resolution << numerics::below_exponent));
  const Floats rest = fma_negated(mul(k.c.one_minus_beta2, g), g, floats(next));
  const Bits old = bits_of(fma(rest, k.beta2, mul(rest, k.beta2_rest)));
  return subtract_where_greater(bits_of(rest), least, old, all(range), all(0u - range));
}

inline Floats estimate_master(Floats next, Floats direction, const Constants& k) {
  const Floats rest = fma_negated(k.c.minus_step_size, direction, next);
  return fma(rest, k.undecay, rest);
}

// -- elements in memory -----------------------------------------------------------------------------------------

inline const std::uint32_t* words_of(const float* x) { return reinterpret_cast<const std::uint32_t*>(x); }
inline std::uint32_t* words_of(float* x) { return reinterpret_cast<std::uint32_t*>(x); }
inline const std::uint16_t* words_of(const bf16* x) { return reinterpret_cast<const std::uint16_t*>(x); }
inline std::uint16_t* words_of(bf16* x) { return reinterpret_cast<std::uint16_t*>(x); }

inline Bits join_master(Bits weight, Bits residual) {
  return add(up<16>(subtract(weight, down<15>(residual))), residual);
}
template <StateFormat format>
Bits load_master(const AdamPiece& p, std::int64_t i) {
  if constexpr (format == StateFormat::fp32) return load(static_cast<const std::uint32_t*>(p.state.master) + i);
  if constexpr (has_fp32_weights(format)) return load(words_of(p.fp32_weight) + i);
  return join_master(load(words_of(p.weight) + i), load(static_cast<const std::uint16_t*>(p.state.master) + i));
}

template <StateFormat format>
Bits load_gradient(const AdamPiece& p, std::int64_t i) {
  if constexpr (has_fp32_weights(format)) return load(words_of(p.fp32_gradient) + i);
  return up<16>(load(words_of(p.gradient) + i));
}

/// Bits of a vector of elements that is to be updated.
struct Operands {
  Bits m, v, master, gradient;
};

/// Old bits of a group that are still in memory, for `append`.
struct OldMoments {
  const std::uint32_t* words;
  std::uint32_t element(int i) const { return words[i]; }
  Bits vector(int j) const { return load(words + j * lanes); }
};
template <StateFormat format>
struct OldMasters {
  const AdamPiece& piece;
  std::int64_t first;
  std::uint32_t element(int i) const { return numerics::float_bits(numerics::load_master<format>(piece, first + i)); }
  Bits vector(int j) const { return load_master<format>(piece, first + j * lanes); }
};

template <StateFormat format>
Operands operands_at(const AdamPiece& p, std::int64_t i) {
  return {load(moments_at<format>(p.state.m, i)), load(moments_at<format>(p.state.v, i)), load_master<format>(p, i),
          load_gradient<format>(p, i)};
}
/// Stores masters of a vector, none of them NaN, and their weights.
template <StateFormat format>
void store_master(const AdamPiece& p, std::int64_t i, Bits x) {
  if constexpr (has_fp32_weights(format)) {
    store(words_of(p.fp32_weight) + i, x);
  } else {
    using Word = std::conditional_t<format == StateFormat::fp32, std::uint32_t, std::uint16_t>;
    store(words_of(p.weight) + i, down<16>(add(x, all(0x8000))));
    store(static_cast<Word*>(p.state.master) + i, x);
  }
}

// -- the update -------------------------------------------------------------------------------------------------

/// Units that old masters are above their estimates.
inline Bits above_estimate(Floats old, Floats next, Floats direction, const Constants& k) {
  return subtract(bits_of(old), bits_of(estimate_master(next, direction, k)));
}
inline Bits master_difference(Floats old, Floats next, Floats direction, const Constants& k) {
  return add(above_estimate(old, next, direction, k), all(numerics::master_range));
}

/// A group that is updated, nothing of it stored.
struct GroupUpdate {
  Group master, m, v;           ///< new
  Group of_m, of_v, of_master;  ///< differences
};

/// AdamW on vector `j`, and the differences of the old state from the estimates that the new one gives. Returns a bit
/// for each element that becomes NaN.
[[gnu::always_inline]] inline unsigned update_vector(GroupUpdate& u, int j, const Operands& old, const Constants& k) {
  const Step step = step_of(floats(old.m), floats(old.v), floats(old.gradient), k.c);
  const Floats master = moved(floats(old.master), step.direction, k.c);
  u.master[j] = bits_of(master);
  u.m[j] = bits_of(step.m);
  u.v[j] = bits_of(step.v);
  u.of_master[j] = master_difference(floats(old.master), master, step.direction, k);
  u.of_m[j] = subtract(old.m, estimate_m(u.m[j], step.g, k));
  u.of_v[j] = subtract(old.v, estimate_v(u.v[j], step.g, k));
  return nan_lanes(master);
}

/// Keeps the masters that escape, and stores the new ones. Returns their codes.
template <StateFormat format>
[[gnu::always_inline]] inline Bytes end_masters(const AdamPiece& p, std::int64_t first, const GroupUpdate& u,
                                                EscapeLists& lists) {
  const Bytes codes = narrow_in_order(u.of_master, numerics::master_escape);
  const std::uint64_t escapes = equal(codes, numerics::master_escape);
  if (escapes != 0) append(escapes, lists.master, OldMasters<format>{p, first});
  for (int j = 0; j < vectors; ++j) store_master<format>(p, first + j * lanes, u.master[j]);
  return codes;
}

/// Keeps the moments that escape, and stores the new ones. Returns their codes.
[[gnu::always_inline]] inline Bytes end_moment(std::uint32_t* moments, const Group& differences, const Group& next,
                                               EscapeList& list) {
  const Bytes codes = narrow_in_order(differences, numerics::moment_escape);
  append(equal(codes, numerics::moment_escape), list, OldMoments{moments});
  for (int j = 0; j < vectors; ++j) store(moments + j * lanes, next[j]);
  return codes;
}

/// Groups ahead of the one at work that are asked for.
template <StateFormat format>
constexpr std::int64_t groups_ahead = format == StateFormat::byte_moments ? 6 : 3;

/// Updates a group and writes its record. Returns false, with nothing stored, where an element becomes NaN.
template <StateFormat format>
bool record_group(const UndoBlock& b, std::int64_t first, const Constants& k, EscapeLists& lists) {
  const AdamPiece& p = b.piece;
  GroupUpdate u;
  unsigned nan = 0;
  for (int j = 0; j < vectors; ++j) nan |= update_vector(u, j, operands_at<format>(p, first + j * lanes), k);
  if (nan != 0) [[unlikely]]
    return false;
  const Bytes of_master = end_masters<format>(p, first, u, lists);
  const Bytes of_m = end_moment(moments_at<format>(p.state.m, first), u.of_m, u.m, lists.m);
  const Bytes of_v = end_moment(moments_at<format>(p.state.v, first), u.of_v, u.v, lists.v);
  store_codes(b.codes + first, of_m, of_v, of_master);
  return true;
}

template <StateFormat format>
std::int64_t record_exact(const UndoBlock& b, EscapeLists& lists) {
  const Constants k(b);
  for (std::int64_t i = 0; i < layout_quantum; i += undo_group) {
    prefetch_group<format>(b.piece, i + groups_ahead<format> * undo_group);
    if (!record_group<format>(b, i, k, lists)) return i;
  }
  return layout_quantum;
}

// -- taking back ------------------------------------------------------------------------------------------------

/// The entries of a list that are still to be read, by elements in order.
using Cursor = const std::uint32_t*;

/// Takes back the masters of vector `j` of a group whose old moments are back, and were stored as `old_m` and `old_v`.
template <StateFormat format>
[[gnu::always_inline]] inline void restore_masters(const UndoBlock& b, std::int64_t first, int j, Floats old_m,
                                                   Floats old_v, std::uint64_t escapes, const Constants& k,
                                                   Cursor& list) {
  const std::int64_t i = first + j * lanes;
  const Step step = step_of(old_m, old_v, floats(load_gradient<format>(b.piece, i)), k.c);
  const Bits estimate = bits_of(estimate_master(floats(load_master<format>(b.piece, i)), step.direction, k));
  const Bits code = load(b.codes + i);
  Bits master = subtract(add(estimate, down<numerics::master_field>(code)), all(numerics::master_range));
  if (escapes != 0) master = insert(escapes, j, master, list);
  store_master<format>(b.piece, i, master);
}

/// Cursors of all lists of moments in fp32.
struct Cursors {
  Cursor m, v, master;
};

template <StateFormat format>
void restore_exact_group(const UndoBlock& b, std::int64_t first, const Constants& k, Cursors& lists) {
  std::uint32_t* const m = moments_at<format>(b.piece.state.m, first);
  std::uint32_t* const v = moments_at<format>(b.piece.state.v, first);
  const Escapes escapes = escapes_of(b.codes + first);
  for (int j = 0; j < vectors; ++j) {
    const Bits code = load(b.codes + first + j * lanes);
    const Floats g = mul(floats(load_gradient<format>(b.piece, first + j * lanes)), k.c.gradient_scale);
    Bits old_m = add(estimate_m(load(m + j * lanes), g, k), both(code, all(7)));
    Bits old_v = add(estimate_v(load(v + j * lanes), g, k), both(down<numerics::v_field>(code), all(7)));
    if (escapes.m != 0) old_m = insert(escapes.m, j, old_m, lists.m);
    if (escapes.v != 0) old_v = insert(escapes.v, j, old_v, lists.v);
    store(m + j * lanes, old_m);
    store(v + j * lanes, old_v);
    restore_masters<format>(b, first, j, floats(old_m), floats(old_v), escapes.master, k, lists.master);
  }
}

template <StateFormat format>
void restore_exact(const UndoBlock& b, const EscapeLists& lists, std::int64_t count) {
  const Constants k(b);
  Cursors rest{lists.m.bits, lists.v.bits, lists.master.bits};
  for (std::int64_t i = 0; i < count; i += undo_group) {
    prefetch_group<format>(b.piece, i + groups_ahead<format> * undo_group);
    restore_exact_group<format>(b, i, k, rest);
  }
}

}  // namespace
}  // namespace tandem::kernels
