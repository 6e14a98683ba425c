#include <immintrin.h>

#include <algorithm>
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
#include "cpu_ops/update/halves_avx2.hpp"

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
/// The smaller ones, without a sign.
inline Bits least(Bits a, Bits b) { return _mm256_min_epu32(a, b); }

/// Zero-extended.
inline Bits load(const std::uint32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline Bits load(const std::uint16_t* p) { return widen_bits(p); }
inline Bits load(const std::uint8_t* p) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
/// The lowest bits of each lane.
inline void store(std::uint32_t* p, Bits x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }
inline void store(std::uint16_t* p, Bits x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), low_halves(x)); }

inline void store(std::uint8_t* p, Bits x) {
  const __m128i half = low_halves(x);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(half, half));
}

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
/// The differences of a group in vectors of the even and of the odd elements of each sixteen, in order, a byte each,
/// and `more` added; `most` in place of those above.
inline Bytes narrow_apart(const Group& x, std::uint32_t more, std::uint32_t most) {
  return of_both([&](int j) {
    const Bits* const of = x + 4 * j;
    const __m256i dealt = _mm256_packs_epi16(_mm256_packs_epi32(of[0], of[2]), _mm256_packs_epi32(of[1], of[3]));
    // In each 128 bits now 4 bytes each of even and of odd elements of the first sixteen and then of the second.
    constexpr std::int64_t first = 0x0b030a0209010800, second = 0x0f070e060d050c04;
    const __m256i evens_and_odds = _mm256_setr_epi64x(first, second, first, second);
    const __m256i ordered = in_order(_mm256_shuffle_epi8(dealt, evens_and_odds));
    return _mm256_min_epu8(_mm256_add_epi8(ordered, every_byte(more)), every_byte(most));
  });
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
/// numerics::kept_code in each byte, or each 16 bits, of which `m` and `v` have the masks.
inline __m256i kept_codes(__m256i old_m, __m256i old_v, __m256i of_master, __m256i m, __m256i v) {
  const __m256i of_v = _mm256_slli_epi16(_mm256_and_si256(old_v, v), numerics::kept_v_field);
  const __m256i moments = _mm256_or_si256(_mm256_and_si256(old_m, m), of_v);
  return _mm256_or_si256(moments, _mm256_slli_epi16(of_master, numerics::master_field));
}
inline void store_kept_bytes(std::uint8_t* codes, const Bytes& old_m, const Bytes& old_v, const Bytes& of_master) {
  store_bytes(codes, of_both([&](int j) {
                return kept_codes(old_m.of[j], old_v.of[j], of_master.of[j], every_byte(numerics::kept_m_bits),
                                  every_byte(numerics::kept_v_bits));
              }));
}
/// Elements of 64 whose old moment is not found again, by numerics::finds_code of magnitudes that are no less than
/// `least`; a bit each. `magnitude`: their bits in a code.
inline std::uint64_t lost_codes(const Bytes& old, const Bytes& next, std::uint8_t more, std::uint8_t less,
                                std::uint32_t magnitude, std::uint32_t least) {
  const auto found = [&](int j) {
    const __m256i o = _mm256_and_si256(old.of[j], every_byte(magnitude)),
                  n = _mm256_and_si256(next.of[j], every_byte(magnitude));
    const __m256i within = _mm256_cmpeq_epi8(
        _mm256_subs_epu8(n, _mm256_subs_epu8(_mm256_adds_epu8(o, every_byte(more)), every_byte(less))),
        _mm256_setzero_si256());
    const __m256i smaller = _mm256_min_epu8(o, n);
    const __m256i numbers = _mm256_cmpeq_epi8(_mm256_max_epu8(smaller, every_byte(least)), smaller);
    const __m256i zeros = _mm256_cmpeq_epi8(_mm256_or_si256(old.of[j], next.of[j]), _mm256_setzero_si256());
    const __m256i all_found = _mm256_or_si256(zeros, _mm256_and_si256(within, numbers));
    return std::uint64_t{static_cast<std::uint32_t>(_mm256_movemask_epi8(all_found))};
  };
  return ~(found(0) | found(1) << 32);
}
inline std::uint64_t lost_m_codes(const Bytes& old, const Bytes& next, std::uint8_t more, std::uint8_t less) {
  return lost_codes(old, next, more, less, numerics::most_m_code, numerics::least_found_m);
}
inline std::uint64_t lost_v_codes(const Bytes& old, const Bytes& next, std::uint8_t more, std::uint8_t less) {
  return lost_codes(old, next, more, less, numerics::most_v_code, numerics::least_found_v);
}

// -- sixteen numbers of 16 bits

constexpr std::int64_t halves = 16;
inline Bits every_half(std::uint32_t x) { return _mm256_set1_epi16(static_cast<short>(x)); }
/// A bit for each number that is all ones, of numbers that are that or 0.
inline std::uint16_t bits_of_halves(Bits x) {
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  return static_cast<std::uint16_t>(_mm_movemask_epi8(bytes));
}
/// A bit for each number that is `x`.
inline std::uint16_t equal_halves(Bits a, std::uint32_t x) {
  return bits_of_halves(_mm256_cmpeq_epi16(a, every_half(x)));
}
/// Units by which a moment may have grown, and what makes of at most less.
inline Bits reach_of_halves(int octaves) {
  return every_half((static_cast<std::uint32_t>(octaves) << numerics::bf16_octave) + 0x80);
}
/// Moments that are not found again by numerics::finds_bf16, a bit each; `old` are those of which `size` are the
/// magnitudes, or negative.
inline std::uint16_t lost_halves(Bits old, Bits size, Bits next, Bits reach) {
  // Saturates, so that nothing is found from infinity.
  static_assert(numerics::bf16_infinity + 0x7f == 0x7fff);
  const Bits within = _mm256_cmpgt_epi16(_mm256_adds_epi16(size, reach), _mm256_add_epi16(next, every_half(0x7f)));
  const Bits found = _mm256_and_si256(within, _mm256_cmpgt_epi16(next, every_half(numerics::least_found_bf16 - 1)));
  const Bits zero = _mm256_cmpeq_epi16(old, _mm256_setzero_si256());
  return static_cast<std::uint16_t>(~bits_of_halves(_mm256_or_si256(zero, found)));
}
inline std::uint16_t lost_m(Bits old, Bits next, Bits reach) {
  const Bits magnitude = every_half(0x7fff);
  return lost_halves(old, _mm256_and_si256(old, magnitude), _mm256_and_si256(next, magnitude), reach);
}
inline std::uint16_t lost_v(Bits old, Bits next, Bits reach) { return lost_halves(old, old, next, reach); }
/// Codes of sixteen elements, by numerics::kept_code.
inline void store_kept(std::uint8_t* codes, Bits old_m, Bits old_v, Bits of_masters) {
  const Bits code =
      kept_codes(old_m, old_v, of_masters, every_half(numerics::kept_m_bits), every_half(numerics::kept_v_bits));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(codes),
                   _mm_packus_epi16(_mm256_castsi256_si128(code), _mm256_extracti128_si256(code, 1)));
}
inline void store_words(const MomentBits& random, std::uint64_t block, std::uint32_t* words) {
  MomentBits::Blocks blocks = random.begin_words(block);
  random.advance(blocks, MomentBits::begun, MomentBits::rounds);
  const RandomWords drawn = MomentBits::words_of(blocks);
  for (int j = 0; j < 4; ++j) store(words + lanes * j, drawn.of[j]);
}

/// Masters of 64 elements that escape, a bit each.
inline std::uint64_t masters_of(const std::uint8_t* codes) {
  const std::uint32_t field = numerics::master_escape << numerics::master_field;
  const Bytes all_codes = load_bytes(codes);
  return equal(of_both([&](int j) { return _mm256_and_si256(all_codes.of[j], every_byte(field)); }), field);
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

#include "cpu_ops/update/undo_rounded_lanes.hpp"

namespace tandem::kernels {

std::int64_t record_avx2(const UndoBlock& block, Unfound& old) { return record_block(block, old); }
void restore_avx2(const UndoBlock& block, const EscapeLists& lists, std::int64_t count) {
  restore_block(block, lists, count);
}

}  // namespace tandem::kernels

#ifdef __clang__
#pragma clang attribute pop
#endif
