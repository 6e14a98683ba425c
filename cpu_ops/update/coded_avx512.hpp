#pragma once
// AdamW on a block of moments in a byte, for AVX-512: updates alone and those that may be taken back run this text.
// Included behind avx512.hpp. Even and odd elements are apart as where moments are bf16: so do the halves of a word of
// random bits serve them.
#include "cpu_ops/update/avx512.hpp"

namespace tandem::kernels {
namespace {

/// Codes of 32 elements, 16 bits each: those of the even elements come low in their lanes, of the odd ones in the upper
/// half.
inline __m512i in_halves(const EvenOdd& x) { return _mm512_mask_blend_epi16(upper_halves, x.even, x.odd); }
/// Codes of 64 elements, a byte each, from two vectors of 16 bits.
inline __m512i in_bytes(const __m512i (&halves)[2]) {
  const __m512i dealt = _mm512_packus_epi16(halves[0], halves[1]);
  return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), dealt);
}

/// numerics::adamw_block of 64 elements from `i` on. `watcher` is told of each vector, even elements of 32 before the
/// odd ones, and then that all will be stored. Returns false, with nothing stored, where an element becomes NaN.
template <class Watcher>
[[gnu::always_inline]] inline bool adamw_coded(const AdamPiece& p, std::int64_t i, const Coefficients& c,
                                               const MomentBits& bits, Watcher& watcher) {
  constexpr int lines = coded_block / 32;
  const CodedBlock of_m = coded_block_at(p.state.m, i), of_v = coded_block_at(p.state.v, i);
  const __m512 scale = power(*of_m.exponent);
  const __m512i base = all(numerics::v_base(*of_v.exponent));
  const auto updated_sixteen = [&](int vector, __m512i master, __m512i m, __m512i v, __m512i gradient) {
    const Step step = step_of(decode_m(m, scale), decode_v(v, base), floats(gradient), c);
    const __m512 next = moved(floats(master), step.direction, c);
    watcher.update(vector, floats(master), step, next);
    return Sixteen{next, step.m, step.v};
  };
  Sixteen even[lines], odd[lines];
  __m512i largest_m = _mm512_setzero_si512(), largest_v = _mm512_setzero_si512();
  unsigned nan = 0;
  for (int j = 0; j < lines; ++j) {
    const EvenOdd gradient = widen_both(p.gradient, i + 32 * j),
                  master = join_both(p.weight, p.state.master, i + 32 * j);
    const EvenOdd m = load_codes(of_m.codes + 32 * j), v = load_codes(of_v.codes + 32 * j);
    even[j] = updated_sixteen(2 * j, master.even, m.even, v.even, gradient.even);
    odd[j] = updated_sixteen(2 * j + 1, master.odd, m.odd, v.odd, gradient.odd);
    nan = nan | nan_of(even[j], odd[j]);
    largest_m = _mm512_max_epu32(largest_m, _mm512_max_epu32(magnitude_of(even[j].m), magnitude_of(odd[j].m)));
    largest_v = _mm512_max_epu32(largest_v, _mm512_max_epu32(magnitude_of(even[j].v), magnitude_of(odd[j].v)));
  }
  const TwoVectors random = bits.words((p.index + static_cast<std::uint64_t>(i)) /
                                       numerics::coded_elements_per_block);  // while the divisions are under way
  if (nan != 0) [[unlikely]]
    return false;
  const std::uint32_t m_exponent = numerics::m_exponent(_mm512_reduce_max_epu32(largest_m));
  const std::uint32_t v_exponent = numerics::v_exponent(_mm512_reduce_max_epu32(largest_v));
  const __m512 new_scale = power(254 - m_exponent);
  const __m512i new_base = all(numerics::v_base(v_exponent));
  watcher.store();
  __m512i m_halves[lines], v_halves[lines];
  for (int j = 0; j < lines; ++j) {
    store_masters(p, i + 32 * j, even[j].master, odd[j].master);
    const EvenOdd of_its_m = increments(random.of[j]), of_its_v = increments(exchanged(random.of[j]));
    m_halves[j] =
        in_halves({encode_m<0>(even[j].m, new_scale, of_its_m.even), encode_m<16>(odd[j].m, new_scale, of_its_m.odd)});
    v_halves[j] =
        in_halves({encode_v<0>(even[j].v, new_base, of_its_v.even), encode_v<16>(odd[j].v, new_base, of_its_v.odd)});
  }
  _mm512_storeu_si512(of_m.codes, in_bytes(m_halves));
  _mm512_storeu_si512(of_v.codes, in_bytes(v_halves));
  *of_m.exponent = static_cast<std::uint8_t>(m_exponent);
  *of_v.exponent = static_cast<std::uint8_t>(v_exponent);
  return true;
}

}  // namespace
}  // namespace tandem::kernels
