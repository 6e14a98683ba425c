#include <immintrin.h>

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

template <int n>
Bits down_signed(Bits x) {
  return _mm512_srai_epi32(x, n);
}

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
/// numerics::v_place of 64 elements.
inline Bytes v_places(Bytes old, Bytes next, std::uint8_t offset) {
  const Bytes place = _mm512_add_epi8(_mm512_sub_epi8(old, next), _mm512_set1_epi8(static_cast<char>(offset)));
  return _mm512_mask_blend_epi8(_mm512_test_epi8_mask(old, old), _mm512_set1_epi8(numerics::v_place_zero),
                                at_most(place, numerics::v_place_escape));
}
/// numerics::old_v_code of 64 elements.
inline Bytes old_v_codes(Bytes places, Bytes next, std::uint8_t offset) {
  const Bytes old = _mm512_sub_epi8(_mm512_add_epi8(next, places), _mm512_set1_epi8(static_cast<char>(offset)));
  return _mm512_maskz_mov_epi8(_mm512_cmpneq_epi8_mask(places, _mm512_set1_epi8(numerics::v_place_zero)), old);
}
inline Bytes places_of(Bytes codes) { return _mm512_and_si512(codes, _mm512_set1_epi8(numerics::v_place_mask)); }
/// Codes from places of v and the differences of masters.
inline Bytes with_masters(Bytes places, Bytes of_master) {
  return _mm512_or_si512(places, _mm512_slli_epi16(of_master, numerics::master_field));
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

#include "cpu_ops/update/undo_lanes.hpp"

namespace tandem::kernels {

namespace {

/// Elements of a group with the even and the odd ones of each 32 apart, as adam_avx512.cpp has them. Arrays of 16 bits
/// an element, and of a byte.
struct Apart {
  /// Random bits of groups one after another.
  struct Draws {
    Draws(const MomentBits& of, std::uint64_t first) : bits(of), index(first) {}
    const MomentBits& bits;
    std::uint64_t index;
  };
  template <StateFormat format, class Body>
  [[gnu::always_inline]] static void for_vectors(const AdamPiece& p, std::int64_t first, Draws& draws,
                                                 const Body& body) {
    const EvenOdd own[] = {draws.bits.draw(draws.index),
                           draws.bits.draw(draws.index + 32)};  // none waits for the other
    draws.index += undo_group;
    for (int j = 0; j < vectors; j += 2) {
      const std::int64_t i = first + j * lanes;
      const EvenOdd& random = own[j / 2];
      const EvenOdd m = widen_both(p.state.m, i), v = widen_both(p.state.v, i), gradient = widen_both(p.gradient, i);
      const EvenOdd master = join_both(p.weight, p.state.master, i);
      const Bits low = all(0xffff);
      body(j, Operands{m.even, v.even, master.even, gradient.even, both(random.even, low), down<16>(random.even)});
      body(j + 1, Operands{m.odd, v.odd, master.odd, gradient.odd, both(random.odd, low), down<16>(random.odd)});
    }
  }
  template <StateFormat>
  static void store_masters(const AdamPiece& p, std::int64_t i, const Group& x) {
    for (int j = 0; j < 2; ++j) kernels::store_masters(p, i + 32 * j, floats(x[2 * j]), floats(x[2 * j + 1]));
  }
  template <StateFormat>
  static void store_moments(std::uint16_t* moments, const Group& x) {
    for (int j = 0; j < 2; ++j) _mm512_storeu_si512(moments + 32 * j, narrow_both({x[2 * j], x[2 * j + 1]}));
  }
  static Bytes narrow(const Group& x, std::uint32_t most) {
    const __m512i dealt = _mm512_packs_epi16(_mm512_packs_epi32(x[0], x[2]), _mm512_packs_epi32(x[1], x[3]));
    // In each 128 bits now 4 bytes each of even and of odd elements of the first 32 and then of the second.
    const __m512i evens_and_odds = _mm512_set4_epi32(0x0f070e06, 0x0d050c04, 0x0b030a02, 0x09010800);
    return at_most(in_order(_mm512_shuffle_epi8(dealt, evens_and_odds)), most);
  }

  template <StateFormat format>
  static Bytes narrow_moments(const Group& x) {
    const __m512i dealt = _mm512_packs_epi16(narrow_both({x[0], x[1]}), narrow_both({x[2], x[3]}));
    return at_most(in_order(dealt), numerics::moment_escape);
  }

 private:  /// Bytes of two vectors of 16-bit numbers that were narrowed within 128 bits.
  static Bytes in_order(__m512i dealt) {
    return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), dealt);
  }
};

}  // namespace

std::int64_t record_avx512(const UndoBlock& block, EscapeLists& lists) { return record_block<Apart>(block, lists); }
void restore_avx512(const UndoBlock& block, const EscapeLists& lists, std::int64_t count) {
  restore_block(block, lists, count);
}

}  // namespace tandem::kernels

#ifdef __clang__
#pragma clang attribute pop
#endif
