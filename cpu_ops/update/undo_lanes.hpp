#pragma once
// The kernels of undo_kernels.hpp in vectors: one text for all instruction sets. Included behind what an instruction set gives:
// the types Floats, Bits (32 bits a lane), Coefficients, Step and MomentBits, the number of lanes, and functions on them.
#include "cpu_ops/update/undo_kernels.hpp"

namespace tandem::kernels {
namespace {

constexpr int vectors = static_cast<int>(undo_group) / lanes;
/// 32 bits for each element of a group.
using Group = Bits[vectors];

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

/// How coded moments of a group are read and coded.
struct Scales {
  explicit Scales(Exponents e) : m(power(e.m)), inverse_m(power(254 - e.m)), v(all(numerics::v_base(e.v))) {}
  Floats m, inverse_m;
  Bits v;
};

// -- numerics, a vector at once ---------------------------------------------------------------------------------

inline Floats magnitude(Floats x) { return floats(magnitude_of(x)); }

template <StateFormat format>
Floats estimate_m(Floats next, Floats g, const Constants& k) {
  const Floats rest = subtract(next, mul(k.c.one_minus_beta1, g));
  const Floats before = fma(rest, k.beta1, mul(rest, k.beta1_rest));
  if constexpr (!rounds_moments(format)) return before;
  return zero_where_less(before, magnitude(rest), mul(every(numerics::resolution<format>), magnitude(next)));
}
template <StateFormat format>
Floats estimate_v(Floats next, Floats g, const Constants& k) {
  const Floats rest = fma_negated(mul(k.c.one_minus_beta2, g), g, next);
  const Floats before = fma(rest, k.beta2, mul(rest, k.beta2_rest));
  return zero_where_less(before, rest, mul(every(numerics::resolution<format>), next));
}
inline Floats estimate_master(Floats next, Floats direction, const Constants& k) {
  const Floats rest = fma_negated(k.c.minus_step_size, direction, next);
  return fma(rest, k.undecay, rest);
}

template <StateFormat format>
Floats read_m(Bits stored, const Scales& scales) {
  if constexpr (format == StateFormat::bf16_moments) return floats(up<16>(stored));
  if constexpr (format == StateFormat::byte_moments) return m_of_code(stored, scales.m);
  return floats(stored);
}
template <StateFormat format>
Floats read_v(Bits stored, const Scales& scales) {
  if constexpr (format == StateFormat::bf16_moments) return floats(up<16>(stored));
  if constexpr (format == StateFormat::byte_moments) return v_of_code(stored, scales.v);
  return floats(stored);
}
/// Rounded to nearest.
template <StateFormat format>
Bits stored_m(Floats m, const Scales& scales) {
  if constexpr (format == StateFormat::bf16_moments) return down<16>(add(bits_of(m), all(0x8000)));
  if constexpr (format == StateFormat::byte_moments) {
    return code_of_m(m, scales.inverse_m, all(numerics::nearest_increment));
  }
  return bits_of(m);
}
template <StateFormat format>
Bits stored_v(Floats v, const Scales& scales) {
  if constexpr (format == StateFormat::bf16_moments) return down<16>(add(bits_of(v), all(0x8000)));
  if constexpr (format == StateFormat::byte_moments) return code_of_v(v, scales.v, all(numerics::nearest_increment));
  return bits_of(v);
}

/// Difference of stored bits, its least that fits a code at 0.
inline Bits difference(Bits old, Bits estimate, std::uint32_t range) { return add(subtract(old, estimate), all(range)); }
inline Bits without_difference(Bits estimate, Bits code, std::uint32_t range) {
  return subtract(add(estimate, code), all(range));
}

// -- elements, wherever they lie --------------------------------------------------------------------------------

inline const std::uint32_t* words_of(const float* x) { return reinterpret_cast<const std::uint32_t*>(x); }
inline std::uint32_t* words_of(float* x) { return reinterpret_cast<std::uint32_t*>(x); }
inline const std::uint16_t* halves_of(const bf16* x) { return reinterpret_cast<const std::uint16_t*>(x); }
inline std::uint16_t* halves_of(bf16* x) { return reinterpret_cast<std::uint16_t*>(x); }

template <StateFormat format>
Floats load_master(const AdamPiece& p, std::int64_t i) {
  if constexpr (format == StateFormat::fp32) return floats(load(static_cast<const std::uint32_t*>(p.state.master) + i));
  if constexpr (has_fp32_weights(format)) return floats(load(words_of(p.fp32_weight) + i));
  const Bits low = load(static_cast<const std::uint16_t*>(p.state.master) + i);
  const Bits high = subtract(load(halves_of(p.weight) + i), down<15>(low));
  return floats(add(up<16>(high), low));
}
/// No NaN.
template <StateFormat format>
void store_master(const AdamPiece& p, std::int64_t i, Floats master) {
  if constexpr (has_fp32_weights(format)) {
    store(words_of(p.fp32_weight) + i, bits_of(master));
  } else {
    store(halves_of(p.weight) + i, down<16>(add(bits_of(master), all(0x8000))));
    using Word = std::conditional_t<format == StateFormat::fp32, std::uint32_t, std::uint16_t>;
    store(static_cast<Word*>(p.state.master) + i, bits_of(master));
  }
}
template <StateFormat format>
Floats load_gradient(const AdamPiece& p, std::int64_t i) {
  if constexpr (has_fp32_weights(format)) return floats(load(words_of(p.fp32_gradient) + i));
  return floats(up<16>(load(halves_of(p.gradient) + i)));
}

// -- the update -------------------------------------------------------------------------------------------------

/// A group after an update, nothing of it stored.
struct NewGroup {
  Floats m[vectors], v[vectors], master[vectors];
  Group stored_m, stored_v;
  Exponents exponents;
};

/// Rounds new moments to what is stored.
template <StateFormat format>
void round_moments(const AdamPiece& p, std::int64_t first, const Constants& k, NewGroup& next) {
  constexpr int drawn = 32 / lanes;
  const std::uint64_t index = p.index + static_cast<std::uint64_t>(first);
  if constexpr (format == StateFormat::bf16_moments) {
    for (int j = 0; j < vectors; j += drawn) {
      Bits words[drawn];
      draw(k.random, (index + static_cast<std::uint64_t>(j * lanes)) / numerics::elements_per_block, words);
      for (int i = 0; i < drawn; ++i) {
        next.stored_m[j + i] = down<16>(add(bits_of(next.m[j + i]), both(words[i], all(0xffff))));
        next.stored_v[j + i] = down<16>(add(bits_of(next.v[j + i]), down<16>(words[i])));
      }
    }
  } else if constexpr (format == StateFormat::byte_moments) {
    Bits largest_m = magnitude_of(next.m[0]), largest_v = magnitude_of(next.v[0]);
    for (int j = 1; j < vectors; ++j) {
      largest_m = larger(largest_m, magnitude_of(next.m[j]));
      largest_v = larger(largest_v, magnitude_of(next.v[j]));
    }
    next.exponents = {numerics::m_exponent(largest_of(largest_m)), numerics::v_exponent(largest_of(largest_v))};
    const Scales scales(next.exponents);
    Bits words[drawn];
    draw(k.random, index / numerics::coded_elements_per_block, words);
    for (int j = 0; j < vectors; ++j) {
      const Bits word = words[j / 2];
      next.stored_m[j] = code_of_m(next.m[j], scales.inverse_m, increment(halves(word, j % 2)));
      next.stored_v[j] = code_of_v(next.v[j], scales.v, increment(halves(exchanged(word), j % 2)));
    }
  } else {
    for (int j = 0; j < vectors; ++j) {
      next.stored_m[j] = bits_of(next.m[j]);
      next.stored_v[j] = bits_of(next.v[j]);
    }
  }
}

/// Returns false, with nothing stored, where an element becomes NaN.
template <StateFormat format>
bool record_group(const UndoBlock& b, std::int64_t first, const Constants& k, EscapeLists& lists) {
  const AdamPiece& p = b.piece;
  auto* const m = moments_at<format>(p.state.m, first);
  auto* const v = moments_at<format>(p.state.v, first);
  const Scales old(exponents_of<format>(p, first));
  NewGroup next;
  Group of_m, of_v, of_master;
  unsigned nan = 0;
  for (int j = 0; j < vectors; ++j) {
    const int i = j * lanes;
    const Floats before = load_master<format>(p, first + i);
    const Step step = step_of(read_m<format>(load(m + i), old), read_v<format>(load(v + i), old),
                              load_gradient<format>(p, first + i), k.c);
    next.m[j] = step.m;
    next.v[j] = step.v;
    next.master[j] = moved(before, step.direction, k.c);
    nan |= nan_lanes(next.master[j]);
    of_master[j] = difference(bits_of(before), bits_of(estimate_master(next.master[j], step.direction, k)),
                              numerics::master_range);
  }
  if (nan != 0) [[unlikely]]
    return false;
  round_moments<format>(p, first, k, next);
  const Scales scales(next.exponents);
  for (int j = 0; j < vectors; ++j) {
    const int i = j * lanes;
    const Floats g = mul(load_gradient<format>(p, first + i), k.c.gradient_scale);
    const Floats before_m = estimate_m<format>(read_m<format>(next.stored_m[j], scales), g, k);
    const Floats before_v = estimate_v<format>(read_v<format>(next.stored_v[j], scales), g, k);
    of_m[j] = difference(load(m + i), stored_m<format>(before_m, old), numerics::moment_range);
    of_v[j] = difference(load(v + i), stored_v<format>(before_v, old), numerics::moment_range);
  }
  const Escapes escapes = store_codes(b.codes + first, of_m, of_v, of_master);
  if (escapes.m != 0) append(escapes.m, lists.m, [&](int j) { return load(m + j * lanes); });
  if (escapes.v != 0) append(escapes.v, lists.v, [&](int j) { return load(v + j * lanes); });
  if (escapes.master != 0) {
    append(escapes.master, lists.master, [&](int j) { return bits_of(load_master<format>(p, first + j * lanes)); });
  }
  for (int j = 0; j < vectors; ++j) {
    store(m + j * lanes, next.stored_m[j]);
    store(v + j * lanes, next.stored_v[j]);
    store_master<format>(p, first + j * lanes, next.master[j]);
  }
  store_exponents<format>(p, first, next.exponents);
  return true;
}

/// Groups ahead of the one at work that are asked for.
template <StateFormat format>
constexpr std::int64_t groups_ahead = format == StateFormat::byte_moments ? 6 : 3;

template <StateFormat format>
std::int64_t record(const UndoBlock& b, EscapeLists& lists) {
  const Constants k(b);
  for (std::int64_t i = 0; i < layout_quantum; i += undo_group) {
    prefetch_group<format>(b.piece, i + groups_ahead<format> * undo_group);
    if (!record_group<format>(b, i, k, lists)) return i;
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
  const Scales after(exponents_of<format>(p, first)), old(old_exponents<format>(b, first));
  const Escapes escapes = escapes_of(b.codes + first);
  for (int j = 0; j < vectors; ++j) {
    const int i = j * lanes;
    const Bits code = load(b.codes + first + i);
    const Floats gradient = load_gradient<format>(p, first + i);
    const Floats g = mul(gradient, k.c.gradient_scale);
    const Bits estimate_of_m = stored_m<format>(estimate_m<format>(read_m<format>(load(m + i), after), g, k), old);
    const Bits estimate_of_v = stored_v<format>(estimate_v<format>(read_v<format>(load(v + i), after), g, k), old);
    Bits old_m = without_difference(estimate_of_m, both(code, all(7)), numerics::moment_range);
    Bits old_v = without_difference(estimate_of_v, both(down<numerics::v_field>(code), all(7)), numerics::moment_range);
    if (escapes.m != 0) old_m = insert(escapes.m, j, old_m, lists.m);
    if (escapes.v != 0) old_v = insert(escapes.v, j, old_v, lists.v);
    const Step step = step_of(read_m<format>(old_m, old), read_v<format>(old_v, old), gradient, k.c);
    const Floats estimate = estimate_master(load_master<format>(p, first + i), step.direction, k);
    Bits master = without_difference(bits_of(estimate), down<numerics::master_field>(code), numerics::master_range);
    if (escapes.master != 0) master = insert(escapes.master, j, master, lists.master);
    store(m + i, old_m);
    store(v + i, old_v);
    store_master<format>(p, first + i, floats(master));
  }
  store_exponents<format>(p, first, old_exponents<format>(b, first));
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

inline std::int64_t record_block(const UndoBlock& b, EscapeLists& lists) {
  std::int64_t updated = 0;
  with_adamw_format(b.piece, [&]<StateFormat format>(Format<format>) { updated = record<format>(b, lists); });
  return updated;
}
inline void restore_block(const UndoBlock& b, const EscapeLists& lists, std::int64_t count) {
  with_adamw_format(b.piece, [&]<StateFormat format>(Format<format>) { restore<format>(b, lists, count); });
}

}  // namespace
}  // namespace tandem::kernels
