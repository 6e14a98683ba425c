#include <immintrin.h>

#include <algorithm>
#include <bit>

#include "cpu_ops/update/adam_kernels.hpp"
#include "cpu_ops/update/undo_kernels.hpp"

// From here on only: inline functions of the headers above stay compiled for any processor.
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,popcnt"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,popcnt")
// GCC 12 warns about the deliberately undefined operands inside its own intrinsics.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include "cpu_ops/update/coded_avx512.hpp"
#include "cpu_ops/update/halves_avx512.hpp"

namespace tandem::kernels {
namespace {

using Floats = __m512;
using Bits = __m512i;
constexpr int lanes = 16;
/// 32 bits of each of 64 elements, and a byte of each.
using Group = Bits[4];
using Bytes = __m512i;

inline Floats every(float x) { return _mm512_set1_ps(x); }
inline Floats subtract(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
/// c - a * b
inline Floats fma_negated(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }
/// A bit for each lane with a NaN.
inline unsigned nan_lanes(Floats x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); }

inline Bits bits_of(Floats x) { return _mm512_castps_si512(x); }
inline Bits add(Bits a, Bits b) { return _mm512_add_epi32(a, b); }
inline Bits subtract(Bits a, Bits b) { return _mm512_sub_epi32(a, b); }
inline Bits both(Bits a, Bits b) { return _mm512_and_si512(a, b); }
/// x - y where a > b as signed numbers, else z.
inline Bits subtract_where_greater(Bits a, Bits b, Bits x, Bits y, Bits z) {
  return _mm512_mask_sub_epi32(z, _mm512_cmpgt_epi32_mask(a, b), x, y);
}
template <int n>
Bits up(Bits x) {
  return _mm512_slli_epi32(x, n);
}
template <int n>
Bits down(Bits x) {
  return _mm512_srli_epi32(x, n);
}
/// The smaller ones, without a sign.
inline Bits least(Bits a, Bits b) { return _mm512_min_epu32(a, b); }

/// Zero-extended.
inline Bits load(const std::uint32_t* p) { return _mm512_loadu_si512(p); }
inline Bits load(const std::uint16_t* p) {
  return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline Bits load(const std::uint8_t* p) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
/// The lowest bits of each lane.
inline void store(std::uint32_t* p, Bits x) { _mm512_storeu_si512(p, x); }
inline void store(std::uint16_t* p, Bits x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(x));
}

inline void store(std::uint8_t* p, Bits x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x)); }

/// Elements of a group whose old bits are in lists, a bit each.
struct Escapes {
  std::uint64_t m, v, master;
};

inline Bytes at_most(Bytes x, std::uint32_t most) {
  return _mm512_min_epu8(x, _mm512_set1_epi8(static_cast<char>(most)));
}
/// The differences of a group, a byte each; `most` in place of those above.
inline Bytes narrow_in_order(const Group& x, std::uint32_t most) {
  const __m512i dealt = _mm512_packs_epi16(_mm512_packs_epi32(x[0], x[1]), _mm512_packs_epi32(x[2], x[3]));
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return at_most(_mm512_permutexvar_epi32(order, dealt), most);
}
/// The differences of a group in vectors of the even and of the odd elements of each 32, in order, a byte each, and
/// `more` added; `most` in place of those above.
inline Bytes narrow_apart(const Group& x, std::uint32_t more, std::uint32_t most) {
  const __m512i dealt = _mm512_packs_epi16(_mm512_packs_epi32(x[0], x[2]), _mm512_packs_epi32(x[1], x[3]));
  // In each 128 bits now 4 bytes each of even and of odd elements of the first 32 and then of the second.
  const __m512i evens_and_odds = _mm512_set4_epi32(0x0f070e06, 0x0d050c04, 0x0b030a02, 0x09010800);
  const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
  const Bytes ordered = _mm512_permutexvar_epi64(order, _mm512_shuffle_epi8(dealt, evens_and_odds));
  return at_most(_mm512_add_epi8(ordered, _mm512_set1_epi8(static_cast<char>(more))), most);
}
/// A bit for each byte that is `x`.
inline std::uint64_t equal(Bytes bytes, std::uint32_t x) {
  return _mm512_cmpeq_epi8_mask(bytes, _mm512_set1_epi8(static_cast<char>(x)));
}
inline void store_codes(std::uint8_t* codes, Bytes of_m, Bytes of_v, Bytes of_master) {
  constexpr int three_way_or = 0xfe;
  const __m512i code = _mm512_ternarylogic_epi32(of_m, _mm512_slli_epi16(of_v, numerics::v_field),
                                                 _mm512_slli_epi16(of_master, numerics::master_field), three_way_or);
  _mm512_storeu_si512(codes, code);
}
inline Bytes load_bytes(const std::uint8_t* p) { return _mm512_loadu_si512(p); }
inline void store_bytes(std::uint8_t* p, Bytes x) { _mm512_storeu_si512(p, x); }
inline Bytes every_byte(std::int32_t x) { return _mm512_set1_epi8(static_cast<char>(x)); }
/// `a` where `mask` has ones, else `b`.
inline Bits where(Bits mask, Bits a, Bits b) { return _mm512_ternarylogic_epi32(a, b, mask, 0xe4); }
/// Codes by numerics::kept_code.
inline void store_kept_bytes(std::uint8_t* codes, Bytes old_m, Bytes old_v, Bytes of_master) {
  const Bytes moments =
      where(every_byte(numerics::kept_m_bits), old_m, _mm512_slli_epi16(old_v, numerics::kept_v_field));
  const Bytes of_masters = _mm512_slli_epi16(of_master, numerics::master_field);
  _mm512_storeu_si512(codes, where(every_byte((1 << numerics::master_field) - 1), moments, of_masters));
}
/// Elements of 64 whose old moment is not found again, by numerics::finds_code of magnitudes that are no less than
/// `least`; a bit each.
inline std::uint64_t lost_codes(Bytes old, Bytes next, std::uint8_t more, std::uint8_t less, std::uint32_t least) {
  const Bytes most = _mm512_subs_epu8(_mm512_adds_epu8(old, every_byte(more)), every_byte(less));
  const Bytes least_found = every_byte(static_cast<std::int32_t>(least));
  return ~(_mm512_cmple_epu8_mask(next, most) & _mm512_cmpge_epu8_mask(_mm512_min_epu8(old, next), least_found));
}
inline std::uint64_t lost_m_codes(Bytes old, Bytes next, std::uint8_t more, std::uint8_t less) {
  const Bytes magnitude = every_byte(numerics::most_m_code), either = _mm512_or_si512(old, next);
  const Bytes old_size = _mm512_and_si512(old, magnitude), next_size = _mm512_and_si512(next, magnitude);
  return _mm512_test_epi8_mask(either, either) & lost_codes(old_size, next_size, more, less, numerics::least_found_m);
}
inline std::uint64_t lost_v_codes(Bytes old, Bytes next, std::uint8_t more, std::uint8_t less) {
  const Bytes either = _mm512_or_si512(old, next);
  return _mm512_test_epi8_mask(either, either) & lost_codes(old, next, more, less, numerics::least_found_v);
}

// -- 32 numbers of 16 bits

constexpr std::int64_t halves = 32;
inline Bits every_half(std::uint32_t x) { return _mm512_set1_epi16(static_cast<short>(x)); }
inline Bits load_halves(const void* array, std::int64_t i) { return _mm512_loadu_si512(at(array, i, 2)); }
inline void store_halves(void* array, std::int64_t i, Bits x) {
  _mm512_storeu_si512(element<std::uint16_t>(array, i), x);
}
/// A bit for each number that is `x`.
inline std::uint32_t equal_halves(Bits a, std::uint32_t x) { return _mm512_cmpeq_epi16_mask(a, every_half(x)); }
/// Units by which a moment may have grown, and what makes of at most less.
inline Bits reach_of_halves(int octaves) {
  return every_half((static_cast<std::uint32_t>(octaves) << numerics::bf16_octave) + 0x80);
}
/// Moments that are not found again by numerics::finds_bf16, a bit each; `old` are those of which `size` are the
/// magnitudes, or negative.
inline std::uint32_t lost_halves(Bits old, Bits size, Bits next, Bits reach) {
  // Saturates, so that nothing is found from infinity.
  static_assert(numerics::bf16_infinity + 0x7f == 0x7fff);
  const __mmask32 lost =
      _mm512_cmpge_epi16_mask(_mm512_add_epi16(next, every_half(0x7f)), _mm512_adds_epi16(size, reach)) |
      _mm512_cmplt_epi16_mask(next, every_half(numerics::least_found_bf16));
  return _mm512_mask_test_epi16_mask(lost, old, old);
}
inline std::uint32_t lost_m(Bits old, Bits next, Bits reach) {
  const Bits magnitude = every_half(0x7fff);
  return lost_halves(old, _mm512_and_si512(old, magnitude), _mm512_and_si512(next, magnitude), reach);
}
inline std::uint32_t lost_v(Bits old, Bits next, Bits reach) { return lost_halves(old, old, next, reach); }
/// Codes of 32 elements, by numerics::kept_code.
inline void store_kept(std::uint8_t* codes, Bits old_m, Bits old_v, Bits of_masters) {
  const Bits moments =
      where(every_half(numerics::kept_m_bits), old_m, _mm512_slli_epi16(old_v, numerics::kept_v_field));
  const Bits masters = _mm512_slli_epi16(of_masters, numerics::master_field);
  const Bits code = where(every_half((1 << numerics::master_field) - 1), moments, masters);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), _mm512_cvtepi16_epi8(code));
}
inline void store_words(const MomentBits& random, std::uint64_t block, std::uint32_t* words) {
  const TwoVectors drawn = random.words(block);
  for (int j = 0; j < 2; ++j) _mm512_store_si512(words + lanes * j, drawn.of[j]);
}

/// Masters of 64 elements that escape, a bit each.
inline std::uint64_t masters_of(const std::uint8_t* codes) {
  const Bytes field = _mm512_set1_epi8(static_cast<char>(numerics::master_escape << numerics::master_field));
  return _mm512_cmpeq_epi8_mask(_mm512_and_si512(_mm512_loadu_si512(codes), field), field);
}
inline Escapes escapes_of(const std::uint8_t* codes) {
  const __m512i code = _mm512_loadu_si512(codes);
  const auto escaped = [code](std::uint32_t field) {
    return equal(_mm512_and_si512(code, _mm512_set1_epi8(static_cast<char>(field))), field);
  };
  return {escaped(numerics::moment_escape), escaped(numerics::moment_escape << numerics::v_field),
          escaped(numerics::master_escape << numerics::master_field)};
}

inline __mmask16 of_vector(std::uint64_t group, int j) { return static_cast<__mmask16>(group >> j * lanes); }

/// Appends old bits; `old.vector(j)` gives those of vector j.
template <class Old>
[[gnu::always_inline]] inline void append(std::uint64_t escapes, EscapeList& list, const Old& old) {
  if (escapes == 0) return;
  std::uint32_t* end = list.bits + list.count;
  for (int j = 0; j < 4; ++j) {
    const __mmask16 mask = of_vector(escapes, j);
    _mm512_storeu_si512(end, _mm512_maskz_compress_epi32(mask, old.vector(j)));
    end += std::popcount(static_cast<unsigned>(mask));
  }
  list.count = end - list.bits;
}
/// Vector `j` with old bits from a list in their places.
inline Bits insert(std::uint64_t escapes, int j, Bits x, const std::uint32_t*& list) {
  const __mmask16 mask = of_vector(escapes, j);
  const Bits inserted = _mm512_mask_expand_epi32(x, mask, _mm512_loadu_si512(list));
  list += std::popcount(static_cast<unsigned>(mask));
  return inserted;
}

}  // namespace
}  // namespace tandem::kernels

#include "cpu_ops/update/undo_rounded_lanes.hpp"

namespace tandem::kernels {

std::int64_t record_avx512(const UndoBlock& block, Unfound& old) { return record_block(block, old); }
void restore_avx512(const UndoBlock& block, const EscapeLists& lists, std::int64_t count) {
  restore_block(block, lists, count);
}

}  // namespace tandem::kernels

#ifdef __clang__
#pragma clang attribute pop
#endif
