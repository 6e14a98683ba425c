#include <immintrin.h>

#include <bit>

#include "cpu_ops/update/adam_kernels.hpp"
#include "cpu_ops/update/undo_kernels.hpp"

// From here on only: inline functions of the headers above stay compiled for any processor.
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif
#include "cpu_ops/update/coded_avx2.hpp"

namespace tandem::kernels {
namespace {

using Floats = __m256;
using Bits = __m256i;
constexpr int lanes = 8;
/// 32 bits of each of 64 elements, and a byte of each.
using Group = Bits[8];
struct Bytes {
  __m256i of[2];
};

inline Floats every(float x) { return _mm256_set1_ps(x); }
inline Floats subtract(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
/// c - a * b
inline Floats fma_negated(Floats a, Floats b, Floats c) { return _mm256_fnmadd_ps(a, b, c); }
/// A bit for each lane with a NaN.
inline unsigned nan_lanes(Floats x) {
  return static_cast<unsigned>(_mm256_movemask_ps(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
}

inline Bits bits_of(Floats x) { return _mm256_castps_si256(x); }
inline Bits add(Bits a, Bits b) { return _mm256_add_epi32(a, b); }
inline Bits subtract(Bits a, Bits b) { return _mm256_sub_epi32(a, b); }
inline Bits both(Bits a, Bits b) { return _mm256_and_si256(a, b); }
/// x - y where a > b as signed numbers, else z.
inline Bits subtract_where_greater(Bits a, Bits b, Bits x, Bits y, Bits z) {
  return _mm256_blendv_epi8(z, subtract(x, y), _mm256_cmpgt_epi32(a, b));
}
template <int n>
Bits up(Bits x) {
  return _mm256_slli_epi32(x, n);
}
template <int n>
Bits down(Bits x) {
  return _mm256_srli_epi32(x, n);
}

template <int n>
Bits down_signed(Bits x) {
  return _mm256_srai_epi32(x, n);
}

/// Zero-extended.
inline Bits load(const std::uint32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline Bits load(const std::uint16_t* p) { return widen_bits(p); }
inline Bits load(const std::uint8_t* p) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
/// The lowest bits of each lane.
inline void store(std::uint32_t* p, Bits x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }
inline void store(std::uint16_t* p, Bits x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), low_halves(x)); }

/// Elements of a group whose old bits are in lists, a bit each.
struct Escapes {
  std::uint64_t m, v, master;
};

inline __m256i every_byte(std::uint32_t x) { return _mm256_set1_epi8(static_cast<char>(x)); }
/// body(j) for both halves.
template <class Body>
[[gnu::always_inline]] inline Bytes of_both(const Body& body) {
  return {{body(0), body(1)}};
}
/// The differences of a group, a byte each; `most` in place of those above.
inline Bytes narrow_in_order(const Group& x, std::uint32_t most) {
  const auto half = [&x, most](int j) {
    const __m256i dealt =
        _mm256_packs_epi16(_mm256_packs_epi32(x[j], x[j + 1]), _mm256_packs_epi32(x[j + 2], x[j + 3]));
    const __m256i ordered = _mm256_permutevar8x32_epi32(dealt, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    return _mm256_min_epu8(ordered, every_byte(most));
  };
  return {{half(0), half(4)}};
}
inline std::uint64_t equal(__m256i bytes, std::uint32_t x) {
  const __m256i same = _mm256_cmpeq_epi8(bytes, _mm256_set1_epi8(static_cast<char>(x)));
  return static_cast<std::uint32_t>(_mm256_movemask_epi8(same));
}
/// A bit for each byte that is `x`.
inline std::uint64_t equal(const Bytes& bytes, std::uint32_t x) {
  return equal(bytes.of[0], x) | equal(bytes.of[1], x) << 32;
}
inline void store_codes(std::uint8_t* codes, const Bytes& of_m, const Bytes& of_v, const Bytes& of_master) {
  for (int j = 0; j < 2; ++j) {
    const __m256i moments = _mm256_or_si256(of_m.of[j], _mm256_slli_epi16(of_v.of[j], numerics::v_field));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + 32 * j),
                        _mm256_or_si256(moments, _mm256_slli_epi16(of_master.of[j], numerics::master_field)));
  }
}
inline Bytes load_bytes(const std::uint8_t* p) {
  return of_both([p](int j) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32 * j)); });
}
inline void store_bytes(std::uint8_t* p, const Bytes& x) {
  for (int j = 0; j < 2; ++j) _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 32 * j), x.of[j]);
}
/// numerics::v_place of 64 elements.
inline Bytes v_places(const Bytes& old, const Bytes& next, std::uint8_t offset) {
  return of_both([&](int j) {
    const __m256i place = _mm256_add_epi8(_mm256_sub_epi8(old.of[j], next.of[j]), every_byte(offset));
    const __m256i zero = _mm256_cmpeq_epi8(old.of[j], _mm256_setzero_si256());
    static_assert((numerics::v_place_escape | numerics::v_place_zero) == numerics::v_place_zero);
    return _mm256_or_si256(_mm256_min_epu8(place, every_byte(numerics::v_place_escape)),
                           _mm256_and_si256(zero, every_byte(numerics::v_place_zero)));
  });
}
/// numerics::old_v_code of 64 elements.
inline Bytes old_v_codes(const Bytes& places, const Bytes& next, std::uint8_t offset) {
  return of_both([&](int j) {
    const __m256i old = _mm256_sub_epi8(_mm256_add_epi8(next.of[j], places.of[j]), every_byte(offset));
    return _mm256_andnot_si256(_mm256_cmpeq_epi8(places.of[j], every_byte(numerics::v_place_zero)), old);
  });
}
inline Bytes places_of(const Bytes& codes) {
  return of_both([&](int j) { return _mm256_and_si256(codes.of[j], every_byte(numerics::v_place_mask)); });
}
/// Codes from places of v and the differences of masters.
inline Bytes with_masters(const Bytes& places, const Bytes& of_master) {
  return of_both(
      [&](int j) { return _mm256_or_si256(places.of[j], _mm256_slli_epi16(of_master.of[j], numerics::master_field)); });
}
inline Escapes escapes_of(const std::uint8_t* codes) {
  const auto escaped = [codes](std::uint32_t field) {
    const __m256i of_field = _mm256_set1_epi8(static_cast<char>(field));
    const auto half = [&](int j) {
      const __m256i code = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + 32 * j));
      return equal(_mm256_and_si256(code, of_field), field) << 32 * j;
    };
    return half(0) | half(1);
  };
  return {escaped(numerics::moment_escape), escaped(numerics::moment_escape << numerics::v_field),
          escaped(numerics::master_escape << numerics::master_field)};
}

/// Calls body(i) for each lane of vector `j` that escapes.
template <class Body>
[[gnu::always_inline]] inline void for_escapes(std::uint64_t escapes, int j, const Body& body) {
  for (std::uint64_t of_vector = escapes >> j * lanes & 0xff; of_vector != 0; of_vector &= of_vector - 1) {
    body(std::countr_zero(of_vector));
  }
}

/// Appends old bits; `old.element(i)` gives those of element i. The first few are written whether they escape or not:
/// how many do cannot be foreseen, and a branch that is taken for another costs as much as several of them.
template <class Old>
[[gnu::always_inline]] inline void append(std::uint64_t escapes, EscapeList& list, const Old& old) {
  constexpr int foreseen = 3;
  std::uint32_t* end = list.bits + list.count;
  for (int i = 0; i < foreseen; ++i) {
    constexpr std::uint64_t last = std::uint64_t{1} << (undo_group - 1);
    *end = old.element(std::countr_zero(escapes | last));
    end += (escapes | (0 - escapes)) >> (undo_group - 1);  // 1 where there is one
    escapes &= escapes - 1;
  }
  for (; escapes != 0; escapes &= escapes - 1) *end++ = old.element(std::countr_zero(escapes));
  list.count = end - list.bits;
}
/// Vector `j` with old bits from a list in their places.
inline Bits insert(std::uint64_t escapes, int j, Bits x, const std::uint32_t*& list) {
  if ((escapes >> j * lanes & 0xff) == 0) return x;
  alignas(32) std::uint32_t bits[lanes];
  store(bits, x);
  for_escapes(escapes, j, [&](int i) { bits[i] = *list++; });
  return load(bits);
}

}  // namespace
}  // namespace tandem::kernels

#include "cpu_ops/update/undo_lanes.hpp"

namespace tandem::kernels {

namespace {

/// Elements of a group with the even and the odd ones of each sixteen apart. Arrays of 16 bits an element, and of a
/// byte.
struct Apart {
  /// Random bits of runs of 32 elements one after another. Those of a run are drawn while the one before is updated: a
  /// round waits for the one before, and divisions leave room for it.
  struct Draws {
    Draws(const MomentBits& of, std::uint64_t first) : bits(of), index(first), next(of.begin_bits(first)) {
      bits.advance(next, MomentBits::begun, MomentBits::rounds);
    }
    /// Bits of the run that comes; begins the one behind it.
    MomentBits::Blocks take() {
      const MomentBits::Blocks drawn = next;
      index += random_run;
      next = bits.begin_bits(index);
      return drawn;
    }
    /// Goes on by the rounds of one of a run's four vectors.
    template <int vector>
    [[gnu::always_inline]] void advance() {
      constexpr int rounds = MomentBits::rounds - MomentBits::begun;
      bits.advance(next, MomentBits::begun + rounds * vector / 4, MomentBits::begun + rounds * (vector + 1) / 4);
    }
    const MomentBits& bits;
    std::uint64_t index;
    MomentBits::Blocks next;
  };
  template <StateFormat format, class Body>
  [[gnu::always_inline]] static void for_vectors(const AdamPiece& p, std::int64_t first, Draws& draws,
                                                 const Body& body) {
    for (int j = 0; j < vectors; j += 4) {
      const MomentBits::Blocks random = draws.take();
      const std::int64_t i = first + j * lanes;
      for_pair<0>(p, i, j, random.low, draws, body);
      for_pair<1>(p, i + 16, j + 2, random.high, draws, body);
    }
  }
  template <int pair, class Body>
  [[gnu::always_inline]] static void for_pair(const AdamPiece& p, std::int64_t i, int j, const RandomState& random,
                                              Draws& draws, const Body& body) {
    const EvenOdd m = widen_both(p.state.m, i), v = widen_both(p.state.v, i), gradient = widen_both(p.gradient, i);
    const EvenOdd master = join_both(p.weight, p.state.master, i);
    const Bits low = all(0xffff);
    body(j, Operands{m.even, v.even, master.even, gradient.even, both(random.even, low), down<16>(random.even)});
    draws.template advance<2 * pair>();
    body(j + 1, Operands{m.odd, v.odd, master.odd, gradient.odd, both(random.odd, low), down<16>(random.odd)});
    draws.template advance<2 * pair + 1>();
  }
  template <StateFormat>
  static void store_masters(const AdamPiece& p, std::int64_t i, const Group& x) {
    for (int j = 0; j < 4; ++j) kernels::store_masters(p, i + 16 * j, floats(x[2 * j]), floats(x[2 * j + 1]));
  }
  template <StateFormat>
  static void store_moments(std::uint16_t* moments, const Group& x) {
    for (int j = 0; j < 4; ++j) store_halves(moments, 16 * j, narrow_both({x[2 * j], x[2 * j + 1]}));
  }
  static Bytes narrow(const Group& x, std::uint32_t most) {
    return of_both([&](int j) {
      const Bits* const of = x + 4 * j;
      const __m256i dealt = _mm256_packs_epi16(_mm256_packs_epi32(of[0], of[2]), _mm256_packs_epi32(of[1], of[3]));
      // In each 128 bits now 4 bytes each of even and of odd elements of the first sixteen and then of the second.
      constexpr std::int64_t first = 0x0b030a0209010800, second = 0x0f070e060d050c04;
      const __m256i evens_and_odds = _mm256_setr_epi64x(first, second, first, second);
      return _mm256_min_epu8(in_order(_mm256_shuffle_epi8(dealt, evens_and_odds)), every_byte(most));
    });
  }
  template <StateFormat format>
  static Bytes narrow_moments(const Group& x) {
    return of_both([&](int j) {
      const Bits* const of = x + 4 * j;
      const __m256i dealt = _mm256_packs_epi16(narrow_both({of[0], of[1]}), narrow_both({of[2], of[3]}));
      return _mm256_min_epu8(in_order(dealt), every_byte(numerics::moment_escape));
    });
  }
};

}  // namespace

std::int64_t record_avx2(const UndoBlock& block, EscapeLists& lists) { return record_block<Apart>(block, lists); }
void restore_avx2(const UndoBlock& block, const EscapeLists& lists, std::int64_t count) {
  restore_block(block, lists, count);
}

}  // namespace tandem::kernels

#ifdef __clang__
#pragma clang attribute pop
#endif
