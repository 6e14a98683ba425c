#pragma once
// The kernels of undo_kernels.hpp in vectors: one text for all instruction sets. Included behind what an instruction set gives:
// the types Floats, Bits (32 bits a lane), Group, Coefficients, Step and MomentBits, and functions on them.
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

/// Constants of a group whose moments are coded.
struct Scales {
  Scales(Exponents after, Exponents before, const Constants& k)
      : m_after(power(254 - after.m)),
        m_part(mul(k.c.one_minus_beta1, m_after)),
        m_ratio(mul(k.beta1, every(numerics::power_between(after.m, before.m)))),
        v_after(all(numerics::v_base(after.v))),
        v_before(all(numerics::v_base(before.v))) {}
  Floats m_after;          ///< makes a new m relative to its block
  Floats m_part, m_ratio;  ///< see numerics::estimate_m_code
  Bits v_after, v_before;
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

/// numerics::estimate_stored_m and _v, with bits below.
template <StateFormat format>
Bits estimate_m(Bits next, Floats g, const Scales& scales, const Constants& k) {
  const Floats resolution = every(numerics::resolution<format>);
  if constexpr (format == StateFormat::byte_moments) {
    const Floats magnitude = relative_m(both(next, all(magnitude_of_code)));
    const Bits relative = or_masked(bits_of(magnitude), up<4>(next), all(0x80000000u));
    const Floats rest = fma_negated(scales.m_part, g, floats(relative));
    const Bits before = bits_of(
        zero_where_less(mul(rest, scales.m_ratio), floats(magnitude_of(rest)), mul(resolution, magnitude)));
    return with_sign(place_of_m(magnitude_of(floats(before)), all(numerics::nearest_increment)), before);
  } else {
    const Floats rest = subtract(floats(next), mul(k.c.one_minus_beta1, g));
    if constexpr (!rounds_moments(format)) return bits_of(fma(rest, k.beta1, mul(rest, k.beta1_rest)));
    const Floats least = mul(resolution, floats(magnitude_of(floats(next))));
    const Floats before = zero_where_less(mul(rest, k.beta1), floats(magnitude_of(rest)), least);
    return add(bits_of(before), all(0x8000));
  }
}
template <StateFormat format>
Bits estimate_v(Bits next, Floats g, const Scales& scales, const Constants& k) {
  const Floats v = format == StateFormat::byte_moments ? decode_v(next, scales.v_after) : floats(next);
  const Floats rest = fma_negated(mul(k.c.one_minus_beta2, g), g, v);
  const Floats least = mul(every(numerics::resolution<format>), v);
  if constexpr (format == StateFormat::byte_moments) {
    const Floats before = zero_where_less(mul(rest, k.beta2), rest, least);
    return zero_where_zero(place_of_v(bits_of(before), scales.v_before, all(numerics::nearest_increment)), before);
  } else if constexpr (format == StateFormat::bf16_moments) {
    return add(bits_of(zero_where_less(mul(rest, k.beta2), rest, least)), all(0x8000));
  } else {
    return bits_of(zero_where_less(fma(rest, k.beta2, mul(rest, k.beta2_rest)), rest, least));
  }
}

/// Difference of a stored moment and its estimate, its least that fits a code at 0.
template <StateFormat format>
Bits difference(Bits old, Bits estimate) {
  if constexpr (!rounds_moments(format)) return add(subtract(old, estimate), all(numerics::moment_range));
  constexpr std::uint32_t raised = mask_below<format> + (numerics::moment_range << bits_below<format>);
  return down_signed<bits_below<format>>(subtract(add(old, all(raised)), estimate));
}
/// The moment of a difference.
template <StateFormat format>
Bits old_moment(Bits estimate, Bits difference) {
  const Bits from = subtract(up<bits_below<format>>(difference), all(numerics::moment_range << bits_below<format>));
  return add(both(estimate, all(~mask_below<format>)), from);
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
  /// Increments of moments in bytes.
  static void draw_codes(const MomentBits& random, std::uint64_t index, Group& of_m, Group& of_v) {
    Bits words[32 / lanes];
    draw(random, index / numerics::coded_elements_per_block, words);
    for (int j = 0; j < vectors; ++j) {
      of_m[j] = increment(halves(words[j / 2], j % 2));
      of_v[j] = increment(halves(exchanged(words[j / 2]), j % 2));
    }
  }
  static Bytes narrow(const Group& x, std::uint32_t most) { return narrow_in_order(x, most); }
};

// -- the update -------------------------------------------------------------------------------------------------

/// A group after an update, nothing of it stored.
struct NewGroup {
  Group m, v, master;        ///< fp32
  Group stored_m, stored_v;  ///< with bits below
  Exponents exponents;
};

/// Rounds new moments to what is stored.
template <StateFormat format, class Layout>
void round_moments(const AdamPiece& p, std::int64_t first, const Constants& k, NewGroup& next) {
  const std::uint64_t index = p.index + static_cast<std::uint64_t>(first);
  Group random_m, random_v;
  if constexpr (format == StateFormat::bf16_moments) {
    Layout::draw_bf16(k.random, index, random_m, random_v);
    for (int j = 0; j < vectors; ++j) {
      next.stored_m[j] = add(next.m[j], random_m[j]);
      next.stored_v[j] = add(next.v[j], random_v[j]);
    }
  } else if constexpr (format == StateFormat::byte_moments) {
    Layout::draw_codes(k.random, index, random_m, random_v);
    Bits largest_m = magnitude_of(floats(next.m[0])), largest_v = magnitude_of(floats(next.v[0]));
    for (int j = 1; j < vectors; ++j) {
      largest_m = larger(largest_m, magnitude_of(floats(next.m[j])));
      largest_v = larger(largest_v, magnitude_of(floats(next.v[j])));
    }
    next.exponents = {numerics::m_exponent(largest_of(largest_m)), numerics::v_exponent(largest_of(largest_v))};
    const Floats scale = power(254 - next.exponents.m);
    const Bits base = all(numerics::v_base(next.exponents.v));
    for (int j = 0; j < vectors; ++j) {
      const Bits relative = bits_of(mul(floats(magnitude_of(floats(next.m[j]))), scale));
      next.stored_m[j] = with_sign(place_of_m(relative, random_m[j]), next.m[j]);
      const Bits v = magnitude_of(floats(next.v[j]));
      next.stored_v[j] = zero_where_zero(place_of_v(v, base, random_v[j]), floats(v));
    }
  } else {
    for (int j = 0; j < vectors; ++j) {
      next.stored_m[j] = next.m[j];
      next.stored_v[j] = next.v[j];
    }
  }
}

/// Returns false, with nothing stored, where an element becomes NaN.
template <StateFormat format, class Layout>
bool record_group(const UndoBlock& b, std::int64_t first, const Constants& k, EscapeLists& lists) {
  const AdamPiece& p = b.piece;
  auto* const m = moments_at<format>(p.state.m, first);
  auto* const v = moments_at<format>(p.state.v, first);
  const Exponents old_exponents = exponents_of<format>(p, first);
  Group old_m, old_v, old_master, gradient;
  Layout::template load_moments<format>(m, old_m);
  Layout::template load_moments<format>(v, old_v);
  Layout::template load_masters<format>(p, first, old_master);
  Layout::template load_gradients<format>(p, first, gradient);
  NewGroup next;
  Group of_m, of_v, of_master;
  unsigned nan = 0;
  for (int j = 0; j < vectors; ++j) {
    const Step step = step_of(read_m<format>(old_m[j], old_exponents), read_v<format>(old_v[j], old_exponents),
                              floats(gradient[j]), k.c);
    const Floats master = moved(floats(old_master[j]), step.direction, k.c);
    next.m[j] = bits_of(step.m);
    next.v[j] = bits_of(step.v);
    next.master[j] = bits_of(master);
    nan |= nan_lanes(master);
    const Bits estimate = bits_of(estimate_master(master, step.direction, k));
    of_master[j] = add(subtract(old_master[j], estimate), all(numerics::master_range));
  }
  if (nan != 0) [[unlikely]]
    return false;
  round_moments<format, Layout>(p, first, k, next);
  const Scales scales(next.exponents, old_exponents, k);
  for (int j = 0; j < vectors; ++j) {
    const Floats g = mul(floats(gradient[j]), k.c.gradient_scale);
    const Bits clear = all(~mask_below<format>);
    of_m[j] = difference<format>(old_m[j], estimate_m<format>(both(next.stored_m[j], clear), g, scales, k));
    of_v[j] = difference<format>(old_v[j], estimate_v<format>(both(next.stored_v[j], clear), g, scales, k));
  }
  const Escapes escapes = store_codes(b.codes + first, Layout::narrow(of_m, numerics::moment_escape),
                                      Layout::narrow(of_v, numerics::moment_escape),
                                      Layout::narrow(of_master, numerics::master_escape));
  if (escapes.m != 0) append(escapes.m, lists.m, [&](int j) { return load(m + j * lanes); });
  if (escapes.v != 0) append(escapes.v, lists.v, [&](int j) { return load(v + j * lanes); });
  if (escapes.master != 0) {
    append(escapes.master, lists.master, [&](int j) { return load_master<format>(p, first + j * lanes); });
  }
  Layout::template store_moments<format>(m, next.stored_m);
  Layout::template store_moments<format>(v, next.stored_v);
  Layout::template store_masters<format>(p, first, next.master);
  store_exponents<format>(p, first, next.exponents);
  return true;
}

/// Groups ahead of the one at work that are asked for.
template <StateFormat format>
constexpr std::int64_t groups_ahead = format == StateFormat::byte_moments ? 6 : 3;

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
    old_m[j] = old_moment<format>(estimate_m<format>(next_m[j], g, scales, k), both(code, all(7)));
    old_v[j] = old_moment<format>(estimate_v<format>(next_v[j], g, scales, k),
                                  both(down<numerics::v_field>(code), all(7)));
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
