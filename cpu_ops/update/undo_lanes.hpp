#pragma once
// The kernels of undo_kernels.hpp in vectors: one text for all instruction sets. Included behind what an instruction
// set gives: the types Floats, Bits (32 bits a lane), Group, Coefficients, Step and MomentBits, and functions on them.
#include <type_traits>

#include "cpu_ops/update/undo_kernels.hpp"

namespace tandem::kernels {
namespace {

constexpr int vectors = static_cast<int>(undo_group) / lanes;

/// Constants that all groups of a block share.
struct Constants {
  explicit Constants(const UndoBlock& b)
      : c(b.c),
        random(b.c),
        beta1(every(b.inverse.beta1)),
        beta1_rest(every(b.inverse.beta1_rest)),
        beta2(every(b.inverse.beta2)),
        beta2_rest(every(b.inverse.beta2_rest)),
        undecay(every(b.inverse.undecay)) {}
  Coefficients c;
  MomentBits random;
  Floats beta1, beta1_rest, beta2, beta2_rest, undecay;  ///< see AdamInverse
};

// -- moments as they are stored, in the upper bits of a lane ----------------------------------------------------

/// Bits of a lane below those of a moment.
template <StateFormat format>
constexpr int bits_below = format == StateFormat::bf16_moments   ? 16
                           : format == StateFormat::byte_moments ? numerics::below_code
                                                                 : 0;
template <StateFormat format>
constexpr std::uint32_t mask_below = (1u << bits_below<format>)-1u;

constexpr std::uint32_t magnitude_of_code = numerics::most_m_code << numerics::below_code;
constexpr std::uint32_t sign_of_code = 0x80u << numerics::below_code;

/// The code of |m|, relative to its block, with bits below.
inline Bits place_of_m(Bits relative, Bits increment) {
  const Bits linear = bits_of(sum(floats(relative), every(numerics::m_linear_below)));
  const Bits place = larger(linear, add(relative, all(numerics::m_binade)));
  return smaller(add(subtract(place, all(numerics::m_linear_bits)), increment),
                 all(magnitude_of_code | mask_below<StateFormat::byte_moments>));
}
/// |m| relative to its block, from its code without bits below.
inline Floats relative_m(Bits place) {
  const Floats linear = subtract(floats(add(place, all(numerics::m_linear_bits))), every(numerics::m_linear_below));
  return smaller(linear, floats(add(place, all(numerics::m_linear_bits - numerics::m_binade))));
}
inline Bits with_sign(Bits place, Bits signs) { return or_masked(place, down<4>(signs), all(sign_of_code)); }
/// The code of a v above 0, with bits below.
inline Bits place_of_v(Bits v, Bits base, Bits increment) {
  const Bits place = larger_signed(add(v, subtract(increment, base)), all(1u << numerics::below_code));
  return smaller(place, all((numerics::most_v_code << numerics::below_code) | mask_below<StateFormat::byte_moments>));
}

template <StateFormat format>
Floats read_m(Bits stored, Exponents e) {
  if constexpr (format == StateFormat::byte_moments) return decode_m(stored, power(e.m));
  return floats(stored);
}
template <StateFormat format>
Floats read_v(Bits stored, Exponents e) {
  if constexpr (format == StateFormat::byte_moments) return decode_v(stored, all(numerics::v_base(e.v)));
  return floats(stored);
}

/// An estimate is subtracted from a moment that is raised by this, and so is the least difference that fits a code at
/// 0, with bits below.
template <StateFormat format>
constexpr std::uint32_t raised = mask_below<format> + (numerics::moment_range << bits_below<format>);

/// Constants of a group by which moments are read and rounded.
struct Scales {
  Scales(Exponents after, Exponents before, const Constants& k)
      : m_after(power(254 - after.m)),
        m_part(mul(k.c.one_minus_beta1, m_after)),
        m_ratio(mul(k.beta1, every(numerics::power_between(after.m, before.m)))),
        v_after(all(numerics::v_base(after.v))),
        v_least(all(numerics::v_base(after.v) - numerics::resolution<StateFormat::byte_moments>)),
        v_below(all(raised<StateFormat::byte_moments> - numerics::nearest_increment + numerics::v_base(before.v))) {}
  Floats m_after;          ///< makes a new m relative to its block
  Floats m_part, m_ratio;  ///< see numerics::estimate_m_code
  Bits v_after, v_least;   ///< bases of the new v, and of the least rest that is one
  Bits v_below;            ///< subtracted from an old v, so that its code is in the upper bits
};

/// numerics::estimate_stored_m and _v less what moments are raised by, with bits below. `signs`: those of the new m.
template <StateFormat format>
Bits estimate_m(Bits next, Bits signs, Floats g, const Scales& scales, const Constants& k) {
  const Bits none = all(0u - raised<format>);
  if constexpr (format == StateFormat::byte_moments) {
    const Bits magnitude = bits_of(relative_m(both(next, all(magnitude_of_code))));
    const Bits relative = or_masked(magnitude, signs, all(0x80000000u));
    const Floats rest = fma_negated(scales.m_part, g, floats(relative));
    const Bits remains = magnitude_of(rest);
    const Bits old = bits_of(mul(floats(remains), scales.m_ratio));
    const Bits linear = bits_of(sum(floats(old), every(numerics::m_linear_below)));
    const Bits place = add(larger(linear, add(old, all(numerics::m_binade))),
                           all(numerics::nearest_increment - numerics::m_linear_bits));
    const Bits least = subtract(magnitude, all(numerics::resolution<format>));
    return subtract_where_greater(remains, least, with_sign(place, bits_of(rest)), all(raised<format>), none);
  } else {
    const Floats rest = subtract(floats(next), mul(k.c.one_minus_beta1, g));
    if constexpr (!rounds_moments(format))
      return subtract(bits_of(fma(rest, k.beta1, mul(rest, k.beta1_rest))), all(raised<format>));
    const Bits least = subtract(magnitude_of(floats(next)), all(numerics::resolution<format>));
    return subtract_where_greater(magnitude_of(rest), least, bits_of(mul(rest, k.beta1)), all(raised<format> - 0x8000),
                                  none);
  }
}
template <StateFormat format>
Bits estimate_v(Bits next, Floats g, const Scales& scales, const Constants& k) {
  const Bits none = all(0u - raised<format>);
  Bits v = next, least = subtract(next, all(numerics::resolution<format>));
  if constexpr (format == StateFormat::byte_moments) {
    v = bits_of(decode_v(next, scales.v_after));
    least = bits_of(decode_v(next, scales.v_least));
  }
  const Floats rest = fma_negated(mul(k.c.one_minus_beta2, g), g, floats(v));
  if constexpr (!rounds_moments(format)) {
    const Bits old = bits_of(fma(rest, k.beta2, mul(rest, k.beta2_rest)));
    return subtract_where_greater(bits_of(rest), least, old, all(raised<format>), none);
  }
  const Bits below = format == StateFormat::bf16_moments ? all(raised<format> - 0x8000) : scales.v_below;
  return subtract_where_greater(bits_of(rest), least, bits_of(mul(rest, k.beta2)), below, none);
}

/// The old moment from an estimate and a difference.
template <StateFormat format>
Bits old_moment(Bits estimate, Bits difference) {
  constexpr int below = bits_below<format>;
  const Bits floor = both(add(estimate, all(raised<format>)), all(~mask_below<format>));
  return add(floor, subtract(up<below>(difference), all(numerics::moment_range << below)));
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

/// Elements of a group in order: those of a vector follow one another.
struct InOrder {
  template <StateFormat format>
  static void load_masters(const AdamPiece& p, std::int64_t i, Group& x) {
    for (int j = 0; j < vectors; ++j) x[j] = load_master<format>(p, i + j * lanes);
  }
  /// No NaN.
  template <StateFormat format>
  static void store_masters(const AdamPiece& p, std::int64_t i, const Group& x) {
    for (int j = 0; j < vectors; ++j) {
      if constexpr (has_fp32_weights(format)) {
        store(words_of(p.fp32_weight) + i + j * lanes, x[j]);
      } else {
        using Word = std::conditional_t<format == StateFormat::fp32, std::uint32_t, std::uint16_t>;
        store(words_of(p.weight) + i + j * lanes, down<16>(add(x[j], all(0x8000))));
        store(static_cast<Word*>(p.state.master) + i + j * lanes, x[j]);
      }
    }
  }
  template <StateFormat format>
  static void load_gradients(const AdamPiece& p, std::int64_t i, Group& x) {
    for (int j = 0; j < vectors; ++j) {
      if constexpr (has_fp32_weights(format)) {
        x[j] = load(words_of(p.fp32_gradient) + i + j * lanes);
      } else {
        x[j] = up<16>(load(words_of(p.gradient) + i + j * lanes));
      }
    }
  }
  template <StateFormat format, class Word>
  static void load_moments(const Word* moments, Group& x) {
    for (int j = 0; j < vectors; ++j) x[j] = up<bits_below<format>>(load(moments + j * lanes));
  }
  template <StateFormat format, class Word>
  static void store_moments(Word* moments, const Group& x) {
    for (int j = 0; j < vectors; ++j) store(moments + j * lanes, down<bits_below<format>>(x[j]));
  }
  /// Random bits that are added below bf16 moments.
  static void draw_bf16(const MomentBits& random, std::uint64_t index, Group& of_m, Group& of_v) {
    constexpr int drawn = 32 / lanes;
    for (int j = 0; j < vectors; j += drawn) {
      Bits words[drawn];
      draw(random, (index + static_cast<std::uint64_t>(j * lanes)) / numerics::elements_per_block, words);
      for (int i = 0; i < drawn; ++i) {
        of_m[j + i] = both(words[i], all(0xffff));
        of_v[j + i] = down<16>(words[i]);
      }
    }
  }
  /// Random words of moments in bytes, and their increments.
  struct Words {
    Bits of[32 / lanes];
  };
  static Words draw_codes(const MomentBits& random, std::uint64_t index) {
    Words words;
    draw(random, index / numerics::coded_elements_per_block, words.of);
    return words;
  }
  static void increments(const Words& words, int j, Bits& of_m, Bits& of_v) {
    of_m = increment(halves(words.of[j / 2], j % 2));
    of_v = increment(halves(exchanged(words.of[j / 2]), j % 2));
  }
  static Bytes narrow(const Group& x, std::uint32_t most) { return narrow_in_order(x, most); }
  template <StateFormat format>
  static Bytes narrow_moments(const Group& x) {
    Group differences;
    for (int j = 0; j < vectors; ++j) differences[j] = down_signed<bits_below<format>>(x[j]);
    return narrow_in_order(differences, numerics::moment_escape);
  }
};

// -- the update -------------------------------------------------------------------------------------------------

/// A group that is updated, nothing of it stored.
struct GroupUpdate {
  Group old_m, old_v, old_master, gradient;
  Group m, v, master;           ///< new ones, fp32
  Group stored_m, stored_v;     ///< rounded, with bits below
  Group of_m, of_v, of_master;  ///< differences
  Group random_m, random_v;
  Exponents before, after;
};

/// AdamW on vector `j`. Returns a bit for each element that becomes NaN.
template <StateFormat format>
[[gnu::always_inline]] inline unsigned update_vector(GroupUpdate& u, int j, const Constants& k) {
  const Step step =
      step_of(read_m<format>(u.old_m[j], u.before), read_v<format>(u.old_v[j], u.before), floats(u.gradient[j]), k.c);
  const Floats master = moved(floats(u.old_master[j]), step.direction, k.c);
  u.m[j] = bits_of(step.m);
  u.v[j] = bits_of(step.v);
  u.master[j] = bits_of(master);
  const Bits estimate = bits_of(estimate_master(master, step.direction, k));
  u.of_master[j] = add(subtract(u.old_master[j], estimate), all(numerics::master_range));
  return nan_lanes(master);
}

/// Rounds moments to what is stored.
template <StateFormat format>
[[gnu::always_inline]] inline void round_vector(GroupUpdate& u, int j) {
  if constexpr (format == StateFormat::byte_moments) {
    const Bits relative = bits_of(mul(floats(magnitude_of(floats(u.m[j]))), power(254 - u.after.m)));
    u.stored_m[j] = with_sign(place_of_m(relative, u.random_m[j]), u.m[j]);
    const Bits place = place_of_v(u.v[j], all(numerics::v_base(u.after.v)), u.random_v[j]);
    u.stored_v[j] = zero_where_zero(place, u.v[j]);
  } else if constexpr (format == StateFormat::bf16_moments) {
    u.stored_m[j] = add(u.m[j], u.random_m[j]);
    u.stored_v[j] = add(u.v[j], u.random_v[j]);
  } else {
    u.stored_m[j] = u.m[j];
    u.stored_v[j] = u.v[j];
  }
}

/// Differences of the old moments from the estimates that the stored ones give.
template <StateFormat format>
[[gnu::always_inline]] inline void estimate_vector(GroupUpdate& u, int j, const Scales& scales, const Constants& k) {
  const Floats g = mul(floats(u.gradient[j]), k.c.gradient_scale);
  const Bits clear = all(~mask_below<format>);
  u.of_m[j] = subtract(u.old_m[j], estimate_m<format>(both(u.stored_m[j], clear), u.m[j], g, scales, k));
  u.of_v[j] = subtract(u.old_v[j], estimate_v<format>(both(u.stored_v[j], clear), g, scales, k));
}

/// Exponents of blocks from the new moments; no v is below 0.
inline Exponents new_exponents(const GroupUpdate& u) {
  Bits m = magnitude_of(floats(u.m[0])), v = u.v[0];
  for (int j = 1; j < vectors; ++j) {
    m = larger(m, magnitude_of(floats(u.m[j])));
    v = larger(v, u.v[j]);
  }
  return {numerics::m_exponent(largest_of(m)), numerics::v_exponent(largest_of(v))};
}

/// Keeps the masters that escape, and stores the new ones. Returns their codes.
template <StateFormat format, class Layout>
[[gnu::always_inline]] inline Bytes end_masters(const AdamPiece& p, std::int64_t first, const GroupUpdate& u,
                                                EscapeLists& lists) {
  const Bytes codes = Layout::narrow(u.of_master, numerics::master_escape);
  const std::uint64_t escapes = equal(codes, numerics::master_escape);
  if (escapes != 0) append(escapes, lists.master, [&](int j) { return load_master<format>(p, first + j * lanes); });
  Layout::template store_masters<format>(p, first, u.master);
  return codes;
}

/// Keeps the moments that escape, and stores the new ones. Returns their codes.
template <StateFormat format, class Layout, class Word>
[[gnu::always_inline]] inline Bytes end_moment(Word* moments, const Group& differences, const Group& stored,
                                               EscapeList& list) {
  const Bytes codes = Layout::template narrow_moments<format>(differences);
  const std::uint64_t escapes = equal(codes, numerics::moment_escape);
  if (escapes != 0) append(escapes, list, [&](int j) { return load(moments + j * lanes); });
  Layout::template store_moments<format>(moments, stored);
  return codes;
}

template <StateFormat format, class Layout>
[[gnu::always_inline]] inline void load_group(const AdamPiece& p, std::int64_t first, GroupUpdate& u) {
  u.before = exponents_of<format>(p, first);
  Layout::template load_moments<format>(moments_at<format>(p.state.m, first), u.old_m);
  Layout::template load_moments<format>(moments_at<format>(p.state.v, first), u.old_v);
  Layout::template load_masters<format>(p, first, u.old_master);
  Layout::template load_gradients<format>(p, first, u.gradient);
}

/// Groups ahead of the one at work that are asked for.
template <StateFormat format>
constexpr std::int64_t groups_ahead = format == StateFormat::byte_moments ? 6 : 3;

/// Rounds what has no exponents to share, all of a vector at once, so that other vectors are worked on while one is
/// divided. Returns whether an element becomes NaN.
template <StateFormat format, class Layout>
[[gnu::always_inline]] inline bool update_group(const AdamPiece& p, std::int64_t first, const Constants& k,
                                                GroupUpdate& u) {
  if constexpr (format == StateFormat::bf16_moments) {
    Layout::draw_bf16(k.random, p.index + static_cast<std::uint64_t>(first), u.random_m, u.random_v);
  }
  const Scales scales({}, {}, k);
  unsigned nan = 0;
  for (int j = 0; j < vectors; ++j) {
    nan |= update_vector<format>(u, j, k);
    round_vector<format>(u, j);
    estimate_vector<format>(u, j, scales, k);
  }
  return nan != 0;
}

/// Rounds moments to codes, which have the exponents of the whole group.
template <class Layout>
[[gnu::always_inline]] inline void code_group(const AdamPiece& p, std::int64_t first, const Constants& k,
                                              GroupUpdate& u) {
  constexpr StateFormat format = StateFormat::byte_moments;
  const auto words = Layout::draw_codes(k.random, p.index + static_cast<std::uint64_t>(first));
  u.after = new_exponents(u);
  const Scales scales(u.after, u.before, k);
  for (int j = 0; j < vectors; ++j) {
    Layout::increments(words, j, u.random_m[j], u.random_v[j]);
    round_vector<format>(u, j);
    estimate_vector<format>(u, j, scales, k);
  }
}

/// Updates a group and writes its record. Returns false, with nothing stored, where an element becomes NaN.
template <StateFormat format, class Layout>
bool record_group(const UndoBlock& b, std::int64_t first, const Constants& k, EscapeLists& lists) {
  const AdamPiece& p = b.piece;
  GroupUpdate u;
  load_group<format, Layout>(p, first, u);
  bool nan = false;
  if constexpr (format == StateFormat::byte_moments) {
    unsigned lanes_with_nan = 0;
    for (int j = 0; j < vectors; ++j) lanes_with_nan |= update_vector<format>(u, j, k);
    nan = lanes_with_nan != 0;
  } else {
    nan = update_group<format, Layout>(p, first, k, u);
  }
  if (nan) [[unlikely]]
    return false;
  const Bytes of_master = end_masters<format, Layout>(p, first, u, lists);
  if constexpr (format == StateFormat::byte_moments) code_group<Layout>(p, first, k, u);
  const Bytes of_m = end_moment<format, Layout>(moments_at<format>(p.state.m, first), u.of_m, u.stored_m, lists.m);
  const Bytes of_v = end_moment<format, Layout>(moments_at<format>(p.state.v, first), u.of_v, u.stored_v, lists.v);
  store_exponents<format>(p, first, u.after);
  store_codes(b.codes + first, of_m, of_v, of_master);
  return true;
}

template <StateFormat format, class Layout>
std::int64_t record(const UndoBlock& b, EscapeLists& lists) {
  const Constants k(b);
  for (std::int64_t i = 0; i < layout_quantum; i += undo_group) {
    prefetch_group<format>(b.piece, i + groups_ahead<format> * undo_group);
    if (!record_group<format, Layout>(b, i, k, lists)) return i;
  }
  return layout_quantum;
}

// -- taking back ------------------------------------------------------------------------------------------------

/// The entries of a block's lists that are still to be read.
struct EscapeCursors {
  const std::uint32_t *m, *v, *master;
};

template <StateFormat format>
void restore_group(const UndoBlock& b, std::int64_t first, const Constants& k, EscapeCursors& lists) {
  const AdamPiece& p = b.piece;
  auto* const m = moments_at<format>(p.state.m, first);
  auto* const v = moments_at<format>(p.state.v, first);
  const Exponents before = old_exponents<format>(b, first);
  const Scales scales(exponents_of<format>(p, first), before, k);
  const Escapes escapes = escapes_of(b.codes + first);
  Group next_m, next_v, master, gradient;
  InOrder::load_moments<format>(m, next_m);
  InOrder::load_moments<format>(v, next_v);
  InOrder::load_masters<format>(p, first, master);
  InOrder::load_gradients<format>(p, first, gradient);
  Group old_m, old_v;
  constexpr int below = bits_below<format>;
  for (int j = 0; j < vectors; ++j) {
    const Bits code = load(b.codes + first + j * lanes);
    const Floats g = mul(floats(gradient[j]), k.c.gradient_scale);
    old_m[j] = old_moment<format>(estimate_m<format>(next_m[j], up<4>(next_m[j]), g, scales, k), both(code, all(7)));
    old_v[j] =
        old_moment<format>(estimate_v<format>(next_v[j], g, scales, k), both(down<numerics::v_field>(code), all(7)));
    if (escapes.m != 0) old_m[j] = up<below>(insert(escapes.m, j, down<below>(old_m[j]), lists.m));
    if (escapes.v != 0) old_v[j] = up<below>(insert(escapes.v, j, down<below>(old_v[j]), lists.v));
    const Step step =
        step_of(read_m<format>(old_m[j], before), read_v<format>(old_v[j], before), floats(gradient[j]), k.c);
    const Bits estimate = bits_of(estimate_master(floats(master[j]), step.direction, k));
    master[j] = subtract(add(estimate, down<numerics::master_field>(code)), all(numerics::master_range));
    if (escapes.master != 0) master[j] = insert(escapes.master, j, master[j], lists.master);
  }
  InOrder::store_moments<format>(m, old_m);
  InOrder::store_moments<format>(v, old_v);
  InOrder::store_masters<format>(p, first, master);
  store_exponents<format>(p, first, before);
}

template <StateFormat format>
void restore(const UndoBlock& b, const EscapeLists& lists, std::int64_t count) {
  const Constants k(b);
  EscapeCursors rest{lists.m.bits, lists.v.bits, lists.master.bits};
  for (std::int64_t i = 0; i < count; i += undo_group) {
    prefetch_group<format>(b.piece, i + groups_ahead<format> * undo_group);
    restore_group<format>(b, i, k, rest);
  }
}

/// `Layout`: of vectors of elements whose moments are rounded.
template <class Layout>
std::int64_t record_block(const UndoBlock& b, EscapeLists& lists) {
  std::int64_t updated = 0;
  with_adamw_format(b.piece, [&]<StateFormat format>(Format<format>) {
    updated = record<format, std::conditional_t<rounds_moments(format), Layout, InOrder>>(b, lists);
  });
  return updated;
}
inline void restore_block(const UndoBlock& b, const EscapeLists& lists, std::int64_t count) {
  with_adamw_format(b.piece, [&]<StateFormat format>(Format<format>) { restore<format>(b, lists, count); });
}

}  // namespace
}  // namespace tandem::kernels
