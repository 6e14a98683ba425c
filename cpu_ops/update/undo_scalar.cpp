#include <algorithm>
#include <cstring>

#include "cpu_ops/update/adam_kernels.hpp"
#include "cpu_ops/update/undo_kernels.hpp"

namespace tandem::kernels {
namespace {

using numerics::bits_float;
using numerics::float_bits;

/// State of an element, its moments as they are stored.
struct Stored {
  std::uint32_t m = 0;
  std::uint32_t v = 0;
  std::uint32_t master = 0;
};

/// A moment's bits, whatever the type of its array.
template <class Word>
std::uint32_t load(const Word* moments, std::int64_t i) {
  Word bits;
  std::memcpy(&bits, moments + i, sizeof bits);
  return bits;
}
template <class Word>
void store(Word* moments, std::int64_t i, std::uint32_t bits) {
  const Word stored = static_cast<Word>(bits);
  std::memcpy(moments + i, &stored, sizeof stored);
}

template <StateFormat format>
Stored load(const AdamPiece& p, std::int64_t first, std::int64_t i) {
  return {load(moments_at<format>(p.state.m, first), i), load(moments_at<format>(p.state.v, first), i),
          float_bits(numerics::load_master<format>(p, first + i))};
}
template <StateFormat format>
void store(const AdamPiece& p, std::int64_t first, std::int64_t i, const Stored& s) {
  store(moments_at<format>(p.state.m, first), i, s.m);
  store(moments_at<format>(p.state.v, first), i, s.v);
  numerics::store_master<format>(p, first + i, bits_float(s.master));
}
template <StateFormat format>
float scaled_gradient(const UndoBlock& b, std::int64_t i) {
  return numerics::mul(numerics::load_gradient<format>(b.piece, i), b.c.gradient_scale);
}

/// The moment that stored bits stand for.
template <StateFormat format>
float read_m(std::uint32_t bits, std::uint32_t exponent) {
  if constexpr (format == StateFormat::byte_moments) return numerics::decode_m(bits, exponent);
  return bits_float(format == StateFormat::bf16_moments ? bits << 16 : bits);
}
template <StateFormat format>
float read_v(std::uint32_t bits, std::uint32_t exponent) {
  if constexpr (format == StateFormat::byte_moments) return numerics::decode_v(bits, exponent);
  return bits_float(format == StateFormat::bf16_moments ? bits << 16 : bits);
}

/// An element after an update, before its moments are rounded.
struct Updated {
  float m = 0.0F;
  float v = 0.0F;
  float direction = 0.0F;
};
template <StateFormat format>
Updated update(const Stored& old, Exponents e, float g, const AdamCoefficients& c) {
  const float m = numerics::adam_m(read_m<format>(old.m, e.m), g, c);
  const float v = numerics::adam_v(read_v<format>(old.v, e.v), g, c);
  return {m, v, numerics::adam_direction(m, v, c)};
}

void append(EscapeList& list, std::uint32_t bits) { list.bits[list.count++] = bits; }

/// Random bits by which the moments of an element are rounded; of those in a byte increments.
struct Rounding {
  std::uint32_t m = 0;
  std::uint32_t v = 0;
};
template <StateFormat format>
Rounding rounding_of(const UndoBlock& b, std::int64_t i) {
  const AdamCoefficients& c = b.c;
  const std::uint64_t index = b.piece.index + static_cast<std::uint64_t>(i);
  if constexpr (format == StateFormat::bf16_moments) {
    const std::uint32_t random = numerics::moment_bits(c.seed, c.step, index);
    return {random & 0xffffu, random >> 16};
  } else {
    constexpr std::uint64_t each = numerics::coded_elements_per_block;
    const numerics::Philox128 random = numerics::moment_block(c.seed, c.step, index / each);
    const std::uint32_t half = numerics::half_of_word(random.word[index % each / 2], static_cast<int>(index % 2));
    return {numerics::increment_of_m(half), numerics::increment_of_v(half)};
  }
}

/// Whether old moments are found from new ones.
struct Found {
  bool m = false;
  bool v = false;
};
template <StateFormat format>
Found finds(const UndoBlock& b, const Stored& old, const Stored& next, Exponents before, Exponents after) {
  const AdamInverse& inverse = b.inverse;
  if constexpr (format == StateFormat::bf16_moments) {
    return {numerics::finds_bf16_m(old.m, next.m, inverse.m_octaves),
            numerics::finds_bf16_v(old.v, next.v, inverse.v_octaves)};
  } else {
    const auto zeros = [](std::uint32_t kept) { return kept == numerics::exponent_of_zeros; };
    return {zeros(before.m) || numerics::finds_m_code(old.m, next.m, m_reach(inverse, before, after)),
            zeros(before.v) || numerics::finds_v_code(old.v, next.v, v_reach(inverse, before, after))};
  }
}

/// Keeps the moment of element `i`.
template <StateFormat format>
void keep(OldMoment& old, std::int64_t i, std::uint32_t bits, bool found) {
  store(old.words<MomentWord<format>>(), i, bits);
  old.lost[i / undo_group] |= std::uint64_t{!found} << i % undo_group;
}

/// Codes of an element's moments, from the old stored ones and the new; keeps what they need beside them.
template <StateFormat format>
std::uint32_t record_moments(const UndoBlock& b, std::int64_t i, const Stored& old, const Stored& next,
                             Exponents before, Exponents after, Unfound& unfound) {
  if constexpr (rounds_moments(format)) {
    const Found found = finds<format>(b, old, next, before, after);
    keep<format>(unfound.m, i, old.m, found.m);
    keep<format>(unfound.v, i, old.v, found.v);
    return numerics::kept_code(old.m, old.v, 0);
  } else {
    const float g = scaled_gradient<format>(b, i);
    const float m = numerics::estimate_m(bits_float(next.m), g, b.c, b.inverse);
    const float v = numerics::estimate_v(bits_float(next.v), g, b.c, b.inverse);
    const std::uint32_t of_m = numerics::moment_difference(old.m, float_bits(m));
    const std::uint32_t of_v = numerics::moment_difference(old.v, float_bits(v));
    if (of_m == numerics::moment_escape) append(unfound.lists.m, old.m);
    if (of_v == numerics::moment_escape) append(unfound.lists.v, old.v);
    return numerics::undo_code(of_m, of_v, 0);
  }
}

/// The entries of a block's lists that are still to be read.
struct EscapeCursors {
  explicit EscapeCursors(const EscapeLists& lists)
      : m(lists.m.bits), v(lists.v.bits), master(lists.master.bits), rounded_m(lists.m), rounded_v(lists.v) {}
  const std::uint32_t *m, *v, *master;
  EscapeEntries rounded_m, rounded_v;
};

/// Old rounded moments from the codes of record_moments().
template <StateFormat format>
Stored find_moments(const UndoBlock& b, std::int64_t i, const Stored& next, Exponents before, Exponents after,
                    EscapeCursors& lists) {
  const std::uint32_t code = b.codes[i], of_m = code & numerics::kept_m_bits;
  const std::uint32_t of_v = code >> numerics::kept_v_field & numerics::kept_v_bits;
  const float g = scaled_gradient<format>(b, i);
  const Rounding r = rounding_of<format>(b, i);
  Stored old;
  if constexpr (format == StateFormat::bf16_moments) {
    old.m = numerics::old_bf16_m(next.m, of_m, r.m, g, b.c, b.inverse);
    old.v = numerics::old_bf16_v(next.v, of_v, r.v, g, b.c, b.inverse);
  } else {
    if (before.m != numerics::exponent_of_zeros) {
      old.m = numerics::old_m_code(next.m, of_m, r.m, {before.m, after.m}, g, b.c, b.inverse);
    }
    if (before.v != numerics::exponent_of_zeros) {
      old.v = numerics::old_v_code(next.v, of_v, r.v, {before.v, after.v}, g, b.c, b.inverse);
    }
  }
  lists.rounded_m.insert(&old.m, i, i + 1);
  lists.rounded_v.insert(&old.v, i, i + 1);
  return old;
}

/// Old moments from the codes of record_moments().
template <StateFormat format>
Stored restore_moments(const UndoBlock& b, std::int64_t i, const Stored& next, Exponents before, Exponents after,
                       EscapeCursors& lists) {
  if constexpr (rounds_moments(format)) {
    return find_moments<format>(b, i, next, before, after, lists);
  } else {
    const std::uint32_t code = b.codes[i];
    const float g = scaled_gradient<format>(b, i);
    const float m = numerics::estimate_m(bits_float(next.m), g, b.c, b.inverse);
    const float v = numerics::estimate_v(bits_float(next.v), g, b.c, b.inverse);
    Stored old;
    old.m = numerics::m_escapes(code) ? *lists.m++ : numerics::old_m(float_bits(m), code);
    old.v = numerics::v_escapes(code) ? *lists.v++ : numerics::old_v(float_bits(v), code);
    return old;
  }
}

/// Rounds the moments of a group to what is stored. Returns their exponents.
template <StateFormat format>
Exponents round_moments(const UndoBlock& b, std::int64_t first, const Updated (&next)[undo_group],
                        Stored (&stored)[undo_group]) {
  Exponents e;
  if constexpr (format == StateFormat::byte_moments) {
    std::uint32_t m = 0, v = 0;
    for (const Updated& u : next) {
      m = std::max(m, float_bits(u.m) & 0x7fffffffu);
      v = std::max(v, float_bits(u.v) & 0x7fffffffu);
    }
    e = {numerics::m_exponent(m), numerics::v_exponent(v)};
  }
  for (std::int64_t i = 0; i < undo_group; ++i) {
    if constexpr (rounds_moments(format)) {
      const Rounding r = rounding_of<format>(b, first + i);
      if constexpr (format == StateFormat::bf16_moments) {
        stored[i].m = numerics::round_stochastically(next[i].m, r.m).bits;
        stored[i].v = numerics::round_stochastically(next[i].v, r.v).bits;
      } else {
        stored[i].m = numerics::encode_m(next[i].m, e.m, r.m);
        stored[i].v = numerics::encode_v(next[i].v, e.v, r.v);
      }
    } else {
      stored[i].m = float_bits(next[i].m);
      stored[i].v = float_bits(next[i].v);
    }
  }
  return e;
}

template <StateFormat format>
bool record_group(const UndoBlock& b, std::int64_t first, Unfound& unfound) {
  const Exponents before = exponents_of<format>(b.piece, first), kept = old_exponents<format>(b, first);
  Updated next[undo_group];
  Stored stored[undo_group];
  for (std::int64_t i = 0; i < undo_group; ++i) {
    const Stored old = load<format>(b.piece, first, i);
    next[i] = update<format>(old, before, scaled_gradient<format>(b, first + i), b.c);
    const float master = numerics::adam_master(bits_float(old.master), next[i].direction, b.c);
    if (master != master) return false;
    stored[i].master = float_bits(master);
  }
  const Exponents e = round_moments<format>(b, first, next, stored);
  for (std::int64_t i = 0; i < undo_group; ++i) {
    const Stored old = load<format>(b.piece, first, i);
    const std::uint32_t moments = record_moments<format>(b, first + i, old, stored[i], kept, e, unfound);
    const float estimate = numerics::estimate_master(bits_float(stored[i].master), next[i].direction, b.c, b.inverse);
    const std::uint32_t of_master = numerics::master_difference(old.master, float_bits(estimate));
    if (of_master == numerics::master_escape) append(unfound.lists.master, old.master);
    const std::uint32_t code = moments | of_master << numerics::master_field;
    b.codes[first + i] = static_cast<std::uint8_t>(code);
    store<format>(b.piece, first, i, stored[i]);
  }
  store_exponents<format>(b.piece, first, e);
  return true;
}

template <StateFormat format>
void restore_group(const UndoBlock& b, std::int64_t first, EscapeCursors& lists) {
  const Exponents after = exponents_of<format>(b.piece, first), kept = old_exponents<format>(b, first);
  const Exponents before = exponents_kept(kept);
  for (std::int64_t i = 0; i < undo_group; ++i) {
    const std::uint32_t code = b.codes[first + i];
    const float g = scaled_gradient<format>(b, first + i);
    const Stored next = load<format>(b.piece, first, i);
    Stored old = restore_moments<format>(b, first + i, next, kept, after, lists);
    const float direction = update<format>(old, before, g, b.c).direction;
    const float master = numerics::estimate_master(bits_float(next.master), direction, b.c, b.inverse);
    old.master = numerics::master_escapes(code) ? *lists.master++ : numerics::old_master(float_bits(master), code);
    store<format>(b.piece, first, i, old);
  }
  store_exponents<format>(b.piece, first, before);
}

}  // namespace

std::int64_t record_scalar(const UndoBlock& b, Unfound& old) {
  std::int64_t updated = 0;
  with_adamw_format(b.piece, [&]<StateFormat format>(Format<format>) {
    while (updated < layout_quantum && record_group<format>(b, updated, old)) updated += undo_group;
  });
  return updated;
}

void restore_scalar(const UndoBlock& b, const EscapeLists& lists, std::int64_t count) {
  EscapeCursors rest(lists);
  with_adamw_format(b.piece, [&]<StateFormat format>(Format<format>) {
    for (std::int64_t i = 0; i < count; i += undo_group) restore_group<format>(b, i, rest);
  });
}

}  // namespace tandem::kernels
