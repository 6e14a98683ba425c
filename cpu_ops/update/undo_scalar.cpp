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

/// An element after an update, before its moments are rounded.
struct Updated {
  float m = 0.0F;
  float v = 0.0F;
  float direction = 0.0F;
};
template <StateFormat format>
Updated update(const Stored& old, Exponents e, float g, const AdamCoefficients& c) {
  const float m = numerics::adam_m(numerics::read_m<format>(old.m, e.m), g, c);
  const float v = numerics::adam_v(numerics::read_v<format>(old.v, e.v), g, c);
  return {m, v, numerics::adam_direction(m, v, c)};
}

void append(EscapeList& list, std::uint32_t bits) { list.bits[list.count++] = bits; }

/// Codes of an element's moments, from the old stored ones and the new; keeps what they need beside them.
template <StateFormat format>
std::uint32_t record_moments(const UndoBlock& b, std::int64_t i, const Stored& old, const Stored& next,
                             Exponents before, Exponents after, EscapeLists& lists) {
  if constexpr (format == StateFormat::byte_moments) {
    b.old_m[i] = static_cast<std::uint8_t>(old.m);
    const std::uint32_t place = numerics::v_place(static_cast<std::uint8_t>(old.v), static_cast<std::uint8_t>(next.v),
                                                  numerics::v_place_offset(before.v, after.v));
    if (place == numerics::v_place_escape) append(lists.v, old.v);
    return place;
  } else {
    const float g = scaled_gradient<format>(b, i);
    const std::uint32_t of_m =
        numerics::moment_difference<format>(old.m, numerics::estimate_stored_m<format>(next.m, g, b.c, b.inverse));
    const std::uint32_t of_v =
        numerics::moment_difference<format>(old.v, numerics::estimate_stored_v<format>(next.v, g, b.c, b.inverse));
    if (of_m == numerics::moment_escape) append(lists.m, old.m);
    if (of_v == numerics::moment_escape) append(lists.v, old.v);
    return numerics::undo_code(of_m, of_v, 0);
  }
}

/// The entries of a block's lists that are still to be read.
struct EscapeCursors {
  const std::uint32_t *m, *v, *master;
};

/// Old moments from the codes of record_moments().
template <StateFormat format>
Stored restore_moments(const UndoBlock& b, std::int64_t i, const Stored& next, Exponents before, Exponents after,
                       EscapeCursors& lists) {
  const std::uint32_t code = b.codes[i];
  Stored old;
  if constexpr (format == StateFormat::byte_moments) {
    const std::uint32_t place = code & numerics::v_place_mask;
    old.m = b.old_m[i];
    old.v = place == numerics::v_place_escape ? *lists.v++
                                              : numerics::old_v_code(place, static_cast<std::uint8_t>(next.v),
                                                                     numerics::v_place_offset(before.v, after.v));
  } else {
    const float g = scaled_gradient<format>(b, i);
    old.m = numerics::m_escapes(code)
                ? *lists.m++
                : numerics::old_m<format>(numerics::estimate_stored_m<format>(next.m, g, b.c, b.inverse), code);
    old.v = numerics::v_escapes(code)
                ? *lists.v++
                : numerics::old_v<format>(numerics::estimate_stored_v<format>(next.v, g, b.c, b.inverse), code);
  }
  return old;
}

/// Rounds the moments of a group to what is stored. Returns their exponents.
template <StateFormat format>
Exponents round_moments(const UndoBlock& b, std::int64_t first, const Updated (&next)[undo_group],
                        Stored (&stored)[undo_group]) {
  const AdamCoefficients& c = b.c;
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
    const std::uint64_t index = b.piece.index + static_cast<std::uint64_t>(first + i);
    if constexpr (format == StateFormat::bf16_moments) {
      const std::uint32_t random = numerics::moment_bits(c.seed, c.step, index);
      stored[i].m = numerics::round_stochastically(next[i].m, random & 0xffffu).bits;
      stored[i].v = numerics::round_stochastically(next[i].v, random >> 16).bits;
    } else if constexpr (format == StateFormat::byte_moments) {
      constexpr std::uint64_t each = numerics::coded_elements_per_block;
      const numerics::Philox128 random = numerics::moment_block(c.seed, c.step, index / each);
      const std::uint32_t half = numerics::half_of_word(random.word[index % each / 2], static_cast<int>(index % 2));
      stored[i].m = numerics::encode_m(next[i].m, e.m, numerics::increment_of_m(half));
      stored[i].v = numerics::encode_v(next[i].v, e.v, numerics::increment_of_v(half));
    } else {
      stored[i].m = float_bits(next[i].m);
      stored[i].v = float_bits(next[i].v);
    }
  }
  return e;
}

template <StateFormat format>
bool record_group(const UndoBlock& b, std::int64_t first, EscapeLists& lists) {
  const Exponents old_exponents = exponents_of<format>(b.piece, first);
  Updated next[undo_group];
  Stored stored[undo_group];
  for (std::int64_t i = 0; i < undo_group; ++i) {
    const Stored old = load<format>(b.piece, first, i);
    next[i] = update<format>(old, old_exponents, scaled_gradient<format>(b, first + i), b.c);
    const float master = numerics::adam_master(bits_float(old.master), next[i].direction, b.c);
    if (master != master) return false;
    stored[i].master = float_bits(master);
  }
  const Exponents e = round_moments<format>(b, first, next, stored);
  for (std::int64_t i = 0; i < undo_group; ++i) {
    const Stored old = load<format>(b.piece, first, i);
    const std::uint32_t moments = record_moments<format>(b, first + i, old, stored[i], old_exponents, e, lists);
    const float estimate = numerics::estimate_master(bits_float(stored[i].master), next[i].direction, b.c, b.inverse);
    const std::uint32_t of_master = numerics::master_difference(old.master, float_bits(estimate));
    if (of_master == numerics::master_escape) append(lists.master, old.master);
    const std::uint32_t code = moments | of_master << numerics::master_field;
    b.codes[first + i] = static_cast<std::uint8_t>(code);
    store<format>(b.piece, first, i, stored[i]);
  }
  store_exponents<format>(b.piece, first, e);
  return true;
}

template <StateFormat format>
void restore_group(const UndoBlock& b, std::int64_t first, EscapeCursors& lists) {
  const Exponents after = exponents_of<format>(b.piece, first), e = old_exponents<format>(b, first);
  for (std::int64_t i = 0; i < undo_group; ++i) {
    const std::uint32_t code = b.codes[first + i];
    const float g = scaled_gradient<format>(b, first + i);
    const Stored next = load<format>(b.piece, first, i);
    Stored old = restore_moments<format>(b, first + i, next, e, after, lists);
    const float direction = update<format>(old, e, g, b.c).direction;
    const float master = numerics::estimate_master(bits_float(next.master), direction, b.c, b.inverse);
    old.master = numerics::master_escapes(code) ? *lists.master++ : numerics::old_master(float_bits(master), code);
    store<format>(b.piece, first, i, old);
  }
  store_exponents<format>(b.piece, first, e);
}

}  // namespace

std::int64_t record_scalar(const UndoBlock& b, EscapeLists& lists) {
  std::int64_t updated = 0;
  with_adamw_format(b.piece, [&]<StateFormat format>(Format<format>) {
    while (updated < layout_quantum && record_group<format>(b, updated, lists)) updated += undo_group;
  });
  return updated;
}

void restore_scalar(const UndoBlock& b, const EscapeLists& lists, std::int64_t count) {
  EscapeCursors rest{lists.m.bits, lists.v.bits, lists.master.bits};
  with_adamw_format(b.piece, [&]<StateFormat format>(Format<format>) {
    for (std::int64_t i = 0; i < count; i += undo_group) restore_group<format>(b, i, rest);
  });
}

}  // namespace tandem::kernels
