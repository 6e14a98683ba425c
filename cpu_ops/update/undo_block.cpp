#include "cpu_ops/update/undo_block.hpp"

#include <bit>
#include <cstring>

#include "core/base/error.hpp"
#include "core/host/vectorised.hpp"
#include "cpu_ops/update/adam_kernels.hpp"

namespace tandem::kernels {
namespace {

using numerics::bits_float;
using numerics::float_bits;

/// Elements that share what a loop holds fixed, such as the exponents of coded moments.
constexpr std::int64_t group = coded_block;
constexpr std::int64_t groups = layout_quantum / group;

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

// -- elements, wherever they lie -----------------------------------------------------------------------------

/// One moment of a group of elements.
template <StateFormat format>
struct MomentGroup {
  MomentGroup(void* moment, std::int64_t first) {
    if constexpr (format == StateFormat::byte_moments) {
      const CodedBlock at = coded_block_at(moment, first);
      values = at.codes;
      exponent = at.exponent;
    } else {
      values = static_cast<std::byte*>(moment) + m_bytes(format, first);
    }
  }
  std::uint32_t bits(std::int64_t i) const {
    if constexpr (format == StateFormat::byte_moments) return static_cast<const std::uint8_t*>(values)[i];
    if constexpr (format == StateFormat::bf16_moments) return static_cast<const bf16*>(values)[i].bits;
    return float_bits(static_cast<const float*>(values)[i]);
  }
  void store(std::int64_t i, std::uint32_t bits) const {
    if constexpr (format == StateFormat::byte_moments) {
      static_cast<std::uint8_t*>(values)[i] = static_cast<std::uint8_t>(bits);
    } else if constexpr (format == StateFormat::bf16_moments) {
      static_cast<bf16*>(values)[i].bits = static_cast<std::uint16_t>(bits);
    } else {
      static_cast<float*>(values)[i] = bits_float(bits);
    }
  }

  void* values = nullptr;
  std::uint8_t* exponent = nullptr;
};

/// Exponents of coded moments, in other formats 0.
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
float scaled_gradient(const AdamPiece& p, std::int64_t i, const AdamCoefficients& c) {
  return numerics::mul(numerics::load_gradient<format>(p, i), c.gradient_scale);
}

/// numerics::store_master of what is not NaN.
template <StateFormat format>
void store_number(const AdamPiece& p, std::int64_t i, float master) {
  if constexpr (has_fp32_weights(format)) {
    p.fp32_weight[i] = master;
  } else {
    p.weight[i] = numerics::weight_of_number(master);
    if constexpr (format == StateFormat::fp32) {
      static_cast<float*>(p.state.master)[i] = master;
    } else {
      static_cast<std::uint16_t*>(p.state.master)[i] = numerics::master_residual(master);
    }
  }
}

/// Puts a master and its weight back: for each pair of a weight and a residual there is one master, NaN included.
template <StateFormat format>
void store_old_master(const AdamPiece& p, std::int64_t i, std::uint32_t bits) {
  if constexpr (format == StateFormat::fp32) return numerics::store_master<format>(p, i, bits_float(bits));
  store_number<format>(p, i, bits_float(bits));
}

/// Brings a group of elements nearer, while others are worked on.
template <StateFormat format>
void prefetch_group(const AdamPiece& p, std::int64_t first) {
  constexpr std::size_t moments = format == StateFormat::byte_moments ? group : m_bytes(format, group);
  const auto bring = [](const void* array, std::size_t offset, std::size_t bytes) {
    const auto* const at = static_cast<const char*>(array) + offset;
    for (std::size_t line = 0; line < bytes; line += 64) __builtin_prefetch(at + line);
  };
  bring(p.state.m, m_bytes(format, first), moments);
  bring(p.state.v, v_bytes(format, first), moments);
  if constexpr (has_fp32_weights(format)) {
    bring(p.fp32_weight, weight_bytes(format, first), weight_bytes(format, group));
    bring(p.fp32_gradient, gradient_bytes(format, first), gradient_bytes(format, group));
  } else {
    bring(p.state.master, master_bytes(format, first), master_bytes(format, group));
    bring(p.weight, weight_bytes(format, first), weight_bytes(format, group));
    bring(p.gradient, gradient_bytes(format, first), gradient_bytes(format, group));
  }
}

// -- the update -----------------------------------------------------------------------------------------------

/// Operands by value: a reference may alias the arrays.
struct Update {
  AdamPiece piece;
  AdamCoefficients c;
  AdamInverse inverse;
};

/// Random bits of a block of state: those of bf16_moments a word for each element, those of byte_moments half of one.
struct RandomWords {
  alignas(64) std::uint32_t word[layout_quantum];
};
template <StateFormat format>
void draw_random(Isa isa, const Update& u, RandomWords& random) {
  if constexpr (!rounds_moments(format)) return;
  constexpr std::uint64_t each =
      format == StateFormat::byte_moments ? numerics::coded_elements_per_block : numerics::elements_per_block;
  constexpr auto blocks = static_cast<std::int64_t>(static_cast<std::uint64_t>(layout_quantum) / each);
  const std::uint64_t first = u.piece.index / each;
  switch (isa) {
    case Isa::avx512:
      return moment_words_avx512(u.c, first, blocks, random.word);
    case Isa::avx2:
      return moment_words_avx2(u.c, first, blocks, random.word);
    case Isa::scalar:
      return moment_words_scalar(u.c, first, blocks, random.word);
  }
}

/// The moments of a group after an update, before they are coded.
struct NewMoments {
  alignas(64) float m[group];
  alignas(64) float v[group];
};

/// Bits of moments as they are stored.
struct MomentBits {
  std::uint32_t m = 0;
  std::uint32_t v = 0;
};

/// The moments' part of an element's code, from what they are stored as.
template <StateFormat format>
std::uint32_t moments_code(const Update& u, float g, MomentBits next, Exponents after, MomentBits old,
                           Exponents before) {
  const float m = numerics::estimate_m<format>(numerics::read_m<format>(next.m, after.m), g, u.c, u.inverse);
  const float v = numerics::estimate_v<format>(numerics::read_v<format>(next.v, after.v), g, u.c, u.inverse);
  return numerics::moment_difference(old.m, numerics::stored_m<format>(m, before.m)) |
         numerics::moment_difference(old.v, numerics::stored_v<format>(v, before.v)) << numerics::v_field;
}

/// Bits that the new moments are stored as, where those of other elements do not matter. No NaN: a block that has one is put
/// back.
template <StateFormat format>
MomentBits rounded(float m, float v, std::uint32_t random) {
  if constexpr (format != StateFormat::bf16_moments) return {float_bits(m), float_bits(v)};
  return {(float_bits(m) + (random & 0xffffu)) >> 16, (float_bits(v) + (random >> 16)) >> 16};
}

/// Updates a group, and keeps what it was. Coded moments are left to code_moments(): codes have the master's part alone.
template <StateFormat format>
void update_group(Update u, std::int64_t first, const RandomWords* random, BlockBits* old, NewMoments* next,
                  std::uint8_t* codes) {
  const MomentGroup<format> m(u.piece.state.m, first), v(u.piece.state.v, first);
  const Exponents exponents = exponents_of<format>(u.piece, first);
#pragma GCC ivdep
  for (std::int64_t i = 0; i < group; ++i) {
    const float g = scaled_gradient<format>(u.piece, first + i, u.c);
    const MomentBits bits{m.bits(i), v.bits(i)};
    const float before = numerics::load_master<format>(u.piece, first + i);
    const float new_m = numerics::adam_m(numerics::read_m<format>(bits.m, exponents.m), g, u.c);
    const float new_v = numerics::adam_v(numerics::read_v<format>(bits.v, exponents.v), g, u.c);
    const float direction = numerics::adam_direction(new_m, new_v, u.c);
    const float after = numerics::adam_master(before, direction, u.c);
    const float estimate = numerics::estimate_master(after, direction, u.c, u.inverse);
    const std::uint32_t of_master = numerics::master_difference(float_bits(before), float_bits(estimate));
    std::uint32_t of_moments = 0;
    if constexpr (format == StateFormat::byte_moments) {
      next->m[i] = new_m;
      next->v[i] = new_v;
    } else {
      const std::uint32_t word = format == StateFormat::bf16_moments ? random->word[first + i] : 0;
      const MomentBits stored = rounded<format>(new_m, new_v, word);
      of_moments = moments_code<format>(u, g, stored, {}, bits, {});
      m.store(i, stored.m);
      v.store(i, stored.v);
    }
    old->m[first + i] = bits.m;
    old->v[first + i] = bits.v;
    old->master[first + i] = float_bits(before);
    store_number<format>(u.piece, first + i, after);
    codes[first + i] = static_cast<std::uint8_t>(numerics::undo_code(of_moments, 0, of_master, after));
  }
}

/// Codes a group's moments, and adds their part to the codes of the record.
template <StateFormat format>
void code_moments(Update u, std::int64_t first, const RandomWords* random, const BlockBits* old, const NewMoments* next,
                  std::uint8_t* codes) {
  const MomentGroup<format> m(u.piece.state.m, first), v(u.piece.state.v, first);
  const Exponents before = exponents_of<format>(u.piece, first);
  std::uint32_t largest_m = 0, largest_v = 0;
  for (std::int64_t i = 0; i < group; ++i) {
    const std::uint32_t of_m = float_bits(next->m[i]) & 0x7fffffffu, of_v = float_bits(next->v[i]) & 0x7fffffffu;
    largest_m = largest_m < of_m ? of_m : largest_m;
    largest_v = largest_v < of_v ? of_v : largest_v;
  }
  const Exponents after{numerics::m_exponent(largest_m), numerics::v_exponent(largest_v)};
  alignas(64) std::uint16_t halves[group];
  std::memcpy(halves, random->word + first / 2, sizeof halves);  // the lower half of a word first
#pragma GCC ivdep
  for (std::int64_t i = 0; i < group; ++i) {
    const std::uint32_t half = halves[i];
    const MomentBits stored{numerics::code_of_m(next->m[i], after.m, numerics::increment_of_m(half)),
                            numerics::code_of_v(next->v[i], after.v, numerics::increment_of_v(half))};
    const float g = scaled_gradient<format>(u.piece, first + i, u.c);
    const MomentBits bits{old->m[first + i], old->v[first + i]};
    const std::uint32_t code = codes[first + i] | moments_code<format>(u, g, stored, after, bits, before);
    codes[first + i] = static_cast<std::uint8_t>(code);
    m.store(i, stored.m);
    v.store(i, stored.v);
  }
  *m.exponent = static_cast<std::uint8_t>(after.m);
  *v.exponent = static_cast<std::uint8_t>(after.v);
}

/// Flags the elements of which a code alone does not tell what they were.
void flag_escapes(const std::uint8_t* codes, std::uint8_t* flags) {
#pragma GCC ivdep
  for (std::int64_t i = 0; i < layout_quantum; ++i) flags[i] = numerics::escapes(codes[i]) ? 1 : 0;
}

// -- what does not fit a code ---------------------------------------------------------------------------------

/// Calls body(i) for each element of a block that is flagged.
template <class Body>
void for_flagged(const std::uint8_t* flags, const Body& body) {
  for (std::int64_t i = 0; i < layout_quantum; i += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, flags + i, sizeof word);
    for (; word != 0; word &= word - 1) body(i + std::countr_zero(word) / 8);
  }
}

/// Old bits in the pool, one after another, the lowest bytes of each.
template <class T>
class PoolCursor {
 public:
  explicit PoolCursor(std::byte* at) noexcept : at_(at) {}
  void put(std::uint32_t bits) noexcept {
    const T stored = static_cast<T>(bits);
    std::memcpy(at_, &stored, sizeof stored);
    at_ += sizeof stored;
  }
  std::uint32_t take() noexcept {
    T stored;
    std::memcpy(&stored, at_, sizeof stored);
    at_ += sizeof stored;
    return stored;
  }

 private:
  std::byte* at_;
};

template <StateFormat format>
struct MomentEntry {
  using type = std::uint32_t;
};
template <>
struct MomentEntry<StateFormat::bf16_moments> {
  using type = std::uint16_t;
};
template <>
struct MomentEntry<StateFormat::byte_moments> {
  using type = std::uint8_t;
};

/// The three lists of a block in the pool.
template <StateFormat format>
struct PoolLists {
  using Entry = typename MomentEntry<format>::type;
  PoolLists(std::byte* pool, const UndoCounts& counts) noexcept
      : m(pool), v(pool + counts.m * sizeof(Entry)), master(pool + (std::size_t{counts.m} + counts.v) * sizeof(Entry)) {}
  PoolCursor<Entry> m;
  PoolCursor<Entry> v;
  PoolCursor<std::uint32_t> master;
};

UndoCounts count_escapes(const std::uint8_t* codes, const std::uint8_t* flags) {
  UndoCounts counts;
  for_flagged(flags, [&](std::int64_t i) {
    const std::uint32_t code = codes[i];
    counts.m = static_cast<std::uint16_t>(counts.m + numerics::m_escapes(code));
    counts.v = static_cast<std::uint16_t>(counts.v + numerics::v_escapes(code));
    counts.master = static_cast<std::uint16_t>(counts.master + numerics::master_escapes(code));
  });
  return counts;
}

/// Whether a master has become NaN, as it does where a moment has.
template <StateFormat format>
bool became_nan(const AdamPiece& p, const std::uint8_t* codes, const std::uint8_t* flags) {
  bool found = false;
  for_flagged(flags, [&](std::int64_t i) {
    if (codes[i] != numerics::code_of_nan) return;
    const float master = numerics::load_master<format>(p, i);
    found = found || master != master;
  });
  return found;
}

template <StateFormat format>
void keep_escapes(const BlockBits& old, const std::uint8_t* codes, const std::uint8_t* flags, PoolLists<format> pool) {
  for_flagged(flags, [&](std::int64_t i) {
    const std::uint32_t code = codes[i];
    if (numerics::m_escapes(code)) pool.m.put(old.m[i]);
    if (numerics::v_escapes(code)) pool.v.put(old.v[i]);
    if (numerics::master_escapes(code)) pool.master.put(old.master[i]);
  });
}

// -- taking back ----------------------------------------------------------------------------------------------

/// The old state of a group, right but for what does not fit a code.
template <StateFormat format>
void decode_group(Update u, std::int64_t first, Exponents before, const std::uint8_t* codes, BlockBits* old) {
  const MomentGroup<format> m(u.piece.state.m, first), v(u.piece.state.v, first);
  const Exponents after = exponents_of<format>(u.piece, first);
#pragma GCC ivdep
  for (std::int64_t i = 0; i < group; ++i) {
    const float g = scaled_gradient<format>(u.piece, first + i, u.c);
    const std::uint32_t code = codes[first + i];
    const float of_m = numerics::estimate_m<format>(numerics::read_m<format>(m.bits(i), after.m), g, u.c, u.inverse);
    const float of_v = numerics::estimate_v<format>(numerics::read_v<format>(v.bits(i), after.v), g, u.c, u.inverse);
    const std::uint32_t m_bits =
        numerics::stored_m<format>(of_m, before.m) + (code & numerics::moment_escape) - numerics::moment_range;
    const std::uint32_t v_bits = numerics::stored_v<format>(of_v, before.v) +
                                 (code >> numerics::v_field & numerics::moment_escape) - numerics::moment_range;
    const float new_m = numerics::adam_m(numerics::read_m<format>(m_bits, before.m), g, u.c);
    const float new_v = numerics::adam_v(numerics::read_v<format>(v_bits, before.v), g, u.c);
    const float master = numerics::estimate_master(numerics::load_master<format>(u.piece, first + i),
                                                   numerics::adam_direction(new_m, new_v, u.c), u.c, u.inverse);
    old->m[first + i] = m_bits;
    old->v[first + i] = v_bits;
    old->master[first + i] = float_bits(master) + (code >> numerics::master_field) - numerics::master_range;
  }
}

/// Puts right an element that the codes alone do not tell.
template <StateFormat format>
void decode_escaped(const Update& u, std::int64_t i, Exponents before, std::uint32_t code, BlockBits& old,
                    PoolLists<format>& pool) {
  if (numerics::m_escapes(code)) old.m[i] = pool.m.take();
  if (numerics::v_escapes(code)) old.v[i] = pool.v.take();
  if (numerics::master_escapes(code)) {
    old.master[i] = pool.master.take();
    return;
  }
  const float g = scaled_gradient<format>(u.piece, i, u.c);
  const float m = numerics::adam_m(numerics::read_m<format>(old.m[i], before.m), g, u.c);
  const float v = numerics::adam_v(numerics::read_v<format>(old.v[i], before.v), g, u.c);
  const float master = numerics::estimate_master(numerics::load_master<format>(u.piece, i),
                                                 numerics::adam_direction(m, v, u.c), u.c, u.inverse);
  old.master[i] = float_bits(master) + (code >> numerics::master_field) - numerics::master_range;
}

/// Writes a group's old state.
template <StateFormat format>
void store_group(AdamPiece p, std::int64_t first, Exponents before, const BlockBits* old) {
  const MomentGroup<format> m(p.state.m, first), v(p.state.v, first);
  if constexpr (format == StateFormat::byte_moments) {
    *m.exponent = static_cast<std::uint8_t>(before.m);
    *v.exponent = static_cast<std::uint8_t>(before.v);
  }
#pragma GCC ivdep
  for (std::int64_t i = 0; i < group; ++i) {
    m.store(i, old->m[first + i]);
    v.store(i, old->v[first + i]);
    store_old_master<format>(p, first + i, old->master[first + i]);
  }
}

/// Old exponents of coded moments in a record, those of m before those of v.
template <StateFormat format>
void keep_exponents(const AdamPiece& p, std::uint8_t* exponents) {
  if constexpr (format == StateFormat::byte_moments) {
    for (std::int64_t j = 0; j < groups; ++j) {
      exponents[j] = *coded_block_at(p.state.m, j * group).exponent;
      exponents[groups + j] = *coded_block_at(p.state.v, j * group).exponent;
    }
  }
}
template <StateFormat format>
Exponents kept_exponents(const std::uint8_t* exponents, std::int64_t i) {
  if constexpr (format != StateFormat::byte_moments) return {};
  return {exponents[i / group], exponents[groups + i / group]};
}

/// Writes a block's old state.
template <StateFormat format>
void store_block(Isa isa, const AdamPiece& p, const std::uint8_t* exponents, const BlockBits* old) {
  vectorised(
      [=] {
        for (std::int64_t i = 0; i < layout_quantum; i += group) {
          store_group<format>(p, i, kept_exponents<format>(exponents, i), old);
        }
      },
      isa);
}

template <StateFormat format>
bool update_block(Isa isa, const Update& u, const UndoRun& run, std::int64_t block, std::size_t offset) {
  BlockBits bits;
  alignas(64) std::uint8_t flag[layout_quantum];
  std::uint8_t* const codes = run.codes(block);
  std::uint8_t* const exponents = run.exponents(block);
  keep_exponents<format>(u.piece, exponents);
  RandomWords words;
  draw_random<format>(isa, u, words);
  vectorised(
      [u, random = &words, old = &bits, codes, flags = flag] {
        constexpr std::int64_t ahead = 4 * group;
        for (std::int64_t i = 0; i < layout_quantum; i += group) {
          prefetch_group<format>(u.piece, i + ahead);
          NewMoments next;
          update_group<format>(u, i, random, old, &next, codes);
          if constexpr (format == StateFormat::byte_moments) code_moments<format>(u, i, random, old, &next, codes);
        }
        flag_escapes(codes, flags);
      },
      isa);
  UndoCounts counts = count_escapes(codes, flag);
  const bool fits = offset + run.bytes_of(counts) <= run.pool_bytes() && !became_nan<format>(u.piece, codes, flag);
  if (fits) {
    counts.updated = 1;
    keep_escapes<format>(bits, codes, flag, PoolLists<format>(run.pool() + offset, counts));
  } else {
    store_block<format>(isa, u.piece, exponents, &bits);
  }
  run.counts(block) = fits ? counts : UndoCounts{};
  return fits;
}

template <StateFormat format>
void take_back(Isa isa, const Update& u, const UndoRun& run, std::int64_t block, std::size_t offset) {
  BlockBits bits;
  alignas(64) std::uint8_t flag[layout_quantum];
  const std::uint8_t* const codes = run.codes(block);
  const std::uint8_t* const exponents = run.exponents(block);
  vectorised(
      [u, old = &bits, codes, exponents, flags = flag] {
        constexpr std::int64_t ahead = 4 * group;
        for (std::int64_t i = 0; i < layout_quantum; i += group) {
          prefetch_group<format>(u.piece, i + ahead);
          decode_group<format>(u, i, kept_exponents<format>(exponents, i), codes, old);
        }
        flag_escapes(codes, flags);
      },
      isa);
  PoolLists<format> pool(run.pool() + offset, run.counts(block));
  for_flagged(flag, [&](std::int64_t i) {
    decode_escaped<format>(u, i, kept_exponents<format>(exponents, i), codes[i], bits, pool);
  });
  store_block<format>(isa, u.piece, exponents, &bits);
}

}  // namespace

bool update_block(Isa isa, const AdamPiece& block, const AdamCoefficients& c, const AdamInverse& inverse,
                  const UndoRun& run, std::int64_t index, std::size_t offset) {
  bool updated = false;
  with_adamw_format(block, [&]<StateFormat format>(Format<format>) {
    updated = update_block<format>(isa, Update{block, c, inverse}, run, index, offset);
  });
  return updated;
}

void take_back(Isa isa, const AdamPiece& block, const AdamCoefficients& c, const AdamInverse& inverse,
               const UndoRun& run, std::int64_t index, std::size_t offset) {
  with_adamw_format(block, [&]<StateFormat format>(Format<format>) {
    take_back<format>(isa, Update{block, c, inverse}, run, index, offset);
  });
}

}  // namespace tandem::kernels
