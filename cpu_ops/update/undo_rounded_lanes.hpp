#pragma once
// The kernels of undo_kernels.hpp in vectors, where moments are rounded (core/numerics/undo_rounded.hpp). Their updates
// are the text of plain ones, which tells a watcher of each vector. Included behind undo_lanes.hpp, and what an
// instruction set gives: the updates adamw_run() and adamw_coded(), and functions on vectors of the stored moments.
#include "cpu_ops/update/undo_lanes.hpp"

namespace tandem::kernels {
namespace {

// -- moments in bf16 --------------------------------------------------------------------------------------------

/// Watcher of adamw_run() that writes the record of a block.
class HalvesRecord {
 public:
  HalvesRecord(const UndoBlock& b, const Constants& k, Unfound& old)
      : b_(b),
        k_(k),
        old_(old),
        m_reach_(reach_of_halves(b.inverse.m_octaves)),
        v_reach_(reach_of_halves(b.inverse.v_octaves)) {}

  void update(int j, Floats old, const Step& step, Floats master) {
    const Bits of_master = least(master_difference(old, master, step.direction, k_), all(numerics::master_escape));
    of_masters_[j / 2] = j % 2 == 0 ? of_master : add(of_masters_[j / 2], up<16>(of_master));
  }
  /// `i` within the block.
  void store_moments(std::int64_t i, Bits next_m, Bits next_v) {
    const Bits of_masters = of_masters_[i % random_run / halves];
    const Bits old_m = load_halves(b_.piece.state.m, i), old_v = load_halves(b_.piece.state.v, i);
    store_halves(old_.m.stored, i, old_m);
    store_halves(old_.v.stored, i, old_v);
    store_kept(b_.codes + i, old_m, old_v, of_masters);
    old_.m.set_lost(i, lost_m(old_m, next_m, m_reach_));
    old_.v.set_lost(i, lost_v(old_v, next_v, v_reach_));
    const auto escapes = equal_halves(of_masters, numerics::master_escape);
    if (escapes != 0) append_masters(escapes, i);
  }

 private:
  [[gnu::noinline]] void append_masters(std::uint32_t escapes, std::int64_t i) {
    EscapeList& list = old_.lists.master;
    for (; escapes != 0; escapes &= escapes - 1) {
      const float old = numerics::load_master<StateFormat::bf16_moments>(b_.piece, i + std::countr_zero(escapes));
      list.bits[list.count++] = numerics::float_bits(old);
    }
  }

  const UndoBlock& b_;
  const Constants& k_;
  Unfound& old_;
  Bits m_reach_, v_reach_;
  Bits of_masters_[random_run / halves];  ///< differences of masters of a run, 16 bits each
};

inline std::int64_t record_halves(const UndoBlock& b, Unfound& old) {
  constexpr StateFormat format = StateFormat::bf16_moments;
  const Constants k(b);
  RunBits random(k.random, b.piece.index);
  HalvesRecord record(b, k, old);
  for (std::int64_t i = 0; i < layout_quantum; i += random_run) {
    if (i % undo_group == 0) prefetch_group<format>(b.piece, i + groups_ahead<format> * undo_group);
    if (!adamw_run(b.piece, i, k.c, random, record)) [[unlikely]]
      return i;
  }
  return layout_quantum;
}

// -- moments in a byte ------------------------------------------------------------------------------------------

/// Watcher of adamw_coded() that leaves a group's codes of masters, in their lowest bits, and the masters that escape.
class MasterRecord {
 public:
  MasterRecord(const UndoBlock& b, std::int64_t first, const Constants& k, EscapeList& list)
      : b_(b), first_(first), k_(k), list_(list) {}

  void update(int j, Floats old, const Step& step, Floats master) {
    above_[j] = above_estimate(old, master, step.direction, k_);
  }
  void store() {
    const Bytes codes = narrow_apart(above_, numerics::master_range, numerics::master_escape);
    const std::uint64_t escapes = equal(codes, numerics::master_escape);
    if (escapes != 0) {
      append(escapes, list_, OldMasters<StateFormat::byte_moments>{b_.piece, first_});
    }
    store_bytes(b_.codes + first_, codes);
  }

 private:
  const UndoBlock& b_;
  std::int64_t first_;
  const Constants& k_;
  EscapeList& list_;
  Group above_;
};

/// Codes by which a moment of each group may have grown, or what it must have fallen by: numerics::code_reach, which is
/// 8 for each octave.
struct CodeReaches {
  /// From exponents of a block's groups, those before as they were kept.
  CodeReaches(const std::uint8_t* before, const std::uint8_t* after, int octaves, std::uint32_t most) {
    const __m128i old = load_sixteen(before), next = load_sixteen(after);
    const __m128i allowed = _mm_set1_epi8(static_cast<char>(octaves));
    const __m128i fell = _mm_subs_epu8(old, next), rose = _mm_subs_epu8(next, old);
    const __m128i none = _mm_cmpeq_epi8(_mm_max_epu8(next, _mm_set1_epi8(static_cast<char>(most))), next);
    const __m128i up = _mm_adds_epu8(fell, _mm_subs_epu8(allowed, rose)), down = _mm_subs_epu8(rose, allowed);
    store_sixteen(more, _mm_andnot_si128(none, of_octaves(up)));
    store_sixteen(less, _mm_or_si128(none, of_octaves(down)));
  }
  std::uint8_t more[undo_groups], less[undo_groups];

 private:
  static_assert(undo_groups == 16);
  static __m128i load_sixteen(const std::uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
  static void store_sixteen(std::uint8_t* p, __m128i x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), x); }
  /// Doubled three times, at most 255.
  static __m128i of_octaves(__m128i x) {
    for (int i = 0; i < 3; ++i) x = _mm_adds_epu8(x, x);
    return x;
  }
};

/// Completes the codes of groups whose updates are stored, those of the first `count` elements.
inline void record_codes(const UndoBlock& b, std::int64_t count, Unfound& old) {
  static_assert(layout_quantum == coded_record, "a block's exponents follow one another");
  const CodedBlock m = coded_block_at(b.piece.state.m, 0), v = coded_block_at(b.piece.state.v, 0);
  const std::uint8_t *const before_m = b.exponents, *const before_v = b.exponents + undo_groups;
  const CodeReaches of_m(before_m, m.exponent, b.inverse.m_octaves, numerics::most_m_exponent);
  const CodeReaches of_v(before_v, v.exponent, b.inverse.v_octaves, numerics::most_v_exponent);
  for (std::int64_t i = 0; i < count; i += undo_group) {
    const std::int64_t g = i / undo_group;
    const Bytes old_m = load_bytes(old.m.words<std::uint8_t>() + i), next_m = load_bytes(m.codes + i);
    const Bytes old_v = load_bytes(old.v.words<std::uint8_t>() + i), next_v = load_bytes(v.codes + i);
    store_kept_bytes(b.codes + i, old_m, old_v, load_bytes(b.codes + i));
    if (before_m[g] != numerics::exponent_of_zeros) {
      old.m.set_lost(i, lost_m_codes(old_m, next_m, of_m.more[g], of_m.less[g]));
    }
    if (before_v[g] != numerics::exponent_of_zeros) {
      old.v.set_lost(i, lost_v_codes(old_v, next_v, of_v.more[g], of_v.less[g]));
    }
  }
}

inline std::int64_t record_coded(const UndoBlock& b, Unfound& old) {
  constexpr StateFormat format = StateFormat::byte_moments;
  const Constants k(b);
  std::int64_t end = 0;
  for (; end < layout_quantum; end += undo_group) {
    prefetch_group<format>(b.piece, end + groups_ahead<format> * undo_group);
    store_bytes(old.m.words<std::uint8_t>() + end, load_bytes(moments_at<format>(b.piece.state.m, end)));
    store_bytes(old.v.words<std::uint8_t>() + end, load_bytes(moments_at<format>(b.piece.state.v, end)));
    MasterRecord masters(b, end, k, old.lists.master);
    if (!adamw_coded(b.piece, end, k.c, k.random, masters)) break;
  }
  // Behind the updates: what a group has stored is not read back at once.
  record_codes(b, end, old);
  return end;
}

// -- moments as they are stored ---------------------------------------------------------------------------------

/// Bits of a lane below those of a moment.
template <StateFormat format>
constexpr int bits_below = format == StateFormat::bf16_moments ? 16 : numerics::below_code;

/// Moments of which the stored bits are in the upper bits of a lane.
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

// -- taking back ------------------------------------------------------------------------------------------------

/// Elements that are taken back together: those that a draw of random words serves.
template <StateFormat format>
constexpr std::int64_t found_at_once = format == StateFormat::bf16_moments ? random_run : coded_block;

/// numerics::near_m and near_v.
template <int below>
Bits greatest_with(Bits kept, std::uint32_t mask, Bits most) {
  return add(both(down<below>(subtract(most, up<below>(kept))), all(~mask)), kept);
}
template <int below>
Bits near_m(Bits estimate, Bits kept) {
  return greatest_with<below>(kept, numerics::kept_m_bits, add(estimate, all(43u << (below - 2))));
}
template <int below>
Bits near_v(Bits estimate, Bits kept) {
  return greatest_with<below>(kept, numerics::kept_v_bits, add(estimate, all(5u << (below - 1))));
}
/// x where a > b as signed numbers, else 0.
inline Bits where_greater(Bits a, Bits b, Bits x) { return subtract_where_greater(a, b, x, all(0), all(0)); }

inline Floats rest_of_m(Floats next, Floats g, const Constants& k) {
  return subtract(next, mul(k.c.one_minus_beta1, g));
}
inline Floats rest_of_v(Floats next, Floats g, const Constants& k) {
  return fma_negated(mul(k.c.one_minus_beta2, g), g, next);
}

/// Bits of codes for a vector of moments.
struct Kept {
  explicit Kept(const std::uint8_t* codes)
      : m(both(load(codes), all(numerics::kept_m_bits))),
        v(both(down<numerics::kept_v_field>(load(codes)), all(numerics::kept_v_bits))) {}
  Bits m, v;
};

/// x where numerics::finds_more_than_zero(next), else 0.
inline Bits where_more_than_zero(Bits next, Bits x) {
  return where_greater(next, all(numerics::least_found_bf16 - 1), where_greater(all(numerics::bf16_infinity), next, x));
}
/// Finds old moments of a vector, and stores them; `random`: 32 bits for each.
inline void find_halves(std::uint16_t* m, std::uint16_t* v, const Kept& kept, const std::uint32_t* random, Floats g,
                        const Constants& k) {
  constexpr std::uint32_t resolution = numerics::bf16_resolution << numerics::below_exponent;
  const Bits next_m = load(m), next_v = load(v), bits = load(random);
  const Bits own_m = subtract(add(up<16>(next_m), all(0x8000)), both(bits, all(0xffff)));
  const Bits own_v = subtract(add(up<16>(next_v), all(0x8000)), down<16>(bits));
  const Floats of_m = rest_of_m(floats(own_m), g, k), of_v = rest_of_v(floats(own_v), g, k);
  const Bits old_m = where_greater(magnitude_of(of_m), subtract(magnitude_of(floats(own_m)), all(resolution)),
                                   near_m<16>(bits_of(mul(of_m, k.beta1)), kept.m));
  const Bits old_v =
      where_greater(bits_of(of_v), subtract(own_v, all(resolution)), near_v<16>(bits_of(mul(of_v, k.beta2)), kept.v));
  store(m, where_more_than_zero(both(next_m, all(0x7fff)), old_m));
  store(v, where_more_than_zero(next_v, old_v));
}

/// Constants of a group of coded moments.
struct CodeScales {
  CodeScales(Exponents before, Exponents after)
      : m_after(power(after.m)),
        m_before(power(254 - before.m)),
        v_after(all(numerics::v_base(after.v) + numerics::half_code)),
        v_before(all(numerics::v_base(before.v))) {}
  Floats m_after, m_before;
  Bits v_after, v_before;
};

/// find_halves() of moments in a byte; `random`: 16 bits for each element.
inline void find_codes(std::uint8_t* m, std::uint8_t* v, const Kept& kept, const std::uint16_t* random, Floats g,
                       const CodeScales& scales, const Constants& k) {
  constexpr int below = numerics::below_code;
  const Bits next_m = load(m), next_v = load(v), half = load(random), none = all(0);
  const Bits exchanged_half = add(down<8>(half), up<8>(both(half, all(0xff))));
  const Bits of_m =
      subtract(up<below>(both(next_m, all(numerics::most_m_code))), add(up<4>(half), all(8u - numerics::half_code)));
  const Bits sign = both(up<24>(next_m), all(0x80000000u));
  const Floats own_m = floats(add(bits_of(m_at(of_m, scales.m_after)), sign));
  const Floats own_v = floats(subtract(add(up<below>(next_v), scales.v_after), add(up<4>(exchanged_half), all(8))));
  const Floats old_m = mul(rest_of_m(own_m, g, k), k.beta1), old_v = mul(rest_of_v(own_v, g, k), k.beta2);
  const Bits code_m =
      add(near_m<below>(place_of_m(old_m, scales.m_before), kept.m), both(down<24>(bits_of(old_m)), all(0x80)));
  const Bits code_v = near_v<below>(subtract(bits_of(old_v), scales.v_before), kept.v);
  store(m, where_greater(next_m, none, code_m));
  store(v, where_greater(next_v, none, code_v));
}

/// Random words for found_at_once elements from `first` on.
struct DrawnWords {
  DrawnWords(const UndoBlock& b, std::int64_t first, const Constants& k) {
    const std::uint64_t each =
        b.piece.format == StateFormat::byte_moments ? numerics::coded_elements_per_block : numerics::elements_per_block;
    store_words(k.random, (b.piece.index + static_cast<std::uint64_t>(first)) / each, words);
  }
  alignas(64) std::uint32_t words[32];
};

/// Stores the old moments of a group, or half of one, that codes give back.
inline void find_moments(const UndoBlock& b, std::int64_t first, const Constants& k,
                         Format<StateFormat::bf16_moments>) {
  constexpr StateFormat format = StateFormat::bf16_moments;
  const DrawnWords random(b, first, k);
  for (std::int64_t j = 0; j < found_at_once<format>; j += lanes) {
    const std::int64_t i = first + j;
    const Floats g = mul(floats(load_gradient<format>(b.piece, i)), k.c.gradient_scale);
    find_halves(moments_at<format>(b.piece.state.m, i), moments_at<format>(b.piece.state.v, i), Kept(b.codes + i),
                random.words + j, g, k);
  }
}
inline void find_moments(const UndoBlock& b, std::int64_t first, const Constants& k,
                         Format<StateFormat::byte_moments>) {
  constexpr StateFormat format = StateFormat::byte_moments;
  const DrawnWords random(b, first, k);
  const Exponents before = old_exponents<format>(b, first);
  const CodeScales scales(exponents_kept(before), exponents_of<format>(b.piece, first));
  std::uint8_t* const m = moments_at<format>(b.piece.state.m, first);
  std::uint8_t* const v = moments_at<format>(b.piece.state.v, first);
  for (std::int64_t j = 0; j < found_at_once<format>; j += lanes) {
    const Floats g = mul(floats(load_gradient<format>(b.piece, first + j)), k.c.gradient_scale);
    find_codes(m + j, v + j, Kept(b.codes + first + j), reinterpret_cast<const std::uint16_t*>(random.words) + j, g,
               scales, k);
  }
  if (before.m == numerics::exponent_of_zeros) std::fill_n(m, coded_block, std::uint8_t{0});
  if (before.v == numerics::exponent_of_zeros) std::fill_n(v, coded_block, std::uint8_t{0});
  store_exponents<format>(b.piece, first, exponents_kept(before));
}

template <StateFormat format>
void restore_rounded(const UndoBlock& b, const EscapeLists& lists, std::int64_t count) {
  const Constants k(b);
  EscapeEntries lost_m(lists.m), lost_v(lists.v);
  Cursor masters = lists.master.bits;
  for (std::int64_t first = 0; first < count; first += found_at_once<format>) {
    const std::int64_t end = first + found_at_once<format>;
    prefetch_group<format>(b.piece, first + groups_ahead<format> * undo_group);
    find_moments(b, first, k, Format<format>());
    auto* const m = moments_at<format>(b.piece.state.m, first);
    auto* const v = moments_at<format>(b.piece.state.v, first);
    lost_m.insert(m, first, end);
    lost_v.insert(v, first, end);
    const Exponents e = exponents_of<format>(b.piece, first);
    const std::uint64_t escapes = masters_of(b.codes + first / undo_group * undo_group) >> first % undo_group;
    for (int j = 0; j < found_at_once<format> / lanes; ++j) {
      restore_masters<format>(b, first, j, read_m<format>(up<bits_below<format>>(load(m + j * lanes)), e),
                              read_v<format>(up<bits_below<format>>(load(v + j * lanes)), e), escapes, k, masters);
    }
  }
}

// -- by format --------------------------------------------------------------------------------------------------

inline std::int64_t record_block(const UndoBlock& b, Unfound& old) {
  std::int64_t updated = 0;
  with_adamw_format(b.piece, [&]<StateFormat format>(Format<format>) {
    if constexpr (format == StateFormat::bf16_moments) {
      updated = record_halves(b, old);
    } else if constexpr (format == StateFormat::byte_moments) {
      updated = record_coded(b, old);
    } else {
      updated = record_exact<format>(b, old.lists);
    }
  });
  return updated;
}
inline void restore_block(const UndoBlock& b, const EscapeLists& lists, std::int64_t count) {
  with_adamw_format(b.piece, [&]<StateFormat format>(Format<format>) {
    if constexpr (rounds_moments(format)) {
      restore_rounded<format>(b, lists, count);
    } else {
      restore_exact<format>(b, lists, count);
    }
  });
}

}  // namespace
}  // namespace tandem::kernels
