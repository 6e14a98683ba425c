#pragma once
// AdamW on a block of moments in a byte, for AVX2: updates alone and those that may be taken back run this text.
// Included behind avx2.hpp.
#include "cpu_ops/update/avx2.hpp"

namespace tandem::kernels {
namespace {

/// New state of a block: 64 elements, the even and the odd ones of each sixteen apart; nothing of it stored.
struct CodedUpdate {
  Eight even[coded_block / 16], odd[coded_block / 16];
  __m256i largest_m, largest_v;
  MomentBits::Blocks random;
};

/// Updates 64 elements from `i` on, and draws their random bits beside. `watcher` is told of each vector, even elements
/// of sixteen before the odd ones. Returns whether an element becomes NaN.
template <class Watcher>
[[gnu::always_inline]] inline bool update_coded(const AdamPiece& p, std::int64_t i, const Coefficients& c,
                                                const MomentBits& bits, Watcher& watcher, CodedUpdate& u) {
  const CodedBlock of_m = coded_block_at(p.state.m, i), of_v = coded_block_at(p.state.v, i);
  const __m256 scale = power(*of_m.exponent);
  const __m256i base = all(numerics::v_base(*of_v.exponent));
  const auto updated_eight = [&](int vector, __m256i master, __m256i m, __m256i v, __m256i gradient) {
    const Step step = step_of(decode_m(m, scale), decode_v(v, base), floats(gradient), c);
    const __m256 next = moved(floats(master), step.direction, c);
    watcher.update(vector, floats(master), step, next);
    u.largest_m = _mm256_max_epu32(u.largest_m, magnitude_of(step.m));
    u.largest_v = _mm256_max_epu32(u.largest_v, _mm256_castps_si256(step.v));
    return Eight{next, step.m, step.v};
  };
  u.random = bits.begin_words((p.index + static_cast<std::uint64_t>(i)) / numerics::coded_elements_per_block);
  u.largest_m = u.largest_v = _mm256_setzero_si256();
  __m256 nan = _mm256_setzero_ps();
  for (int j = 0; j < coded_block / 16; ++j) {
    const EvenOdd gradient = widen_both(p.gradient, i + 16 * j),
                  master = join_both(p.weight, p.state.master, i + 16 * j);
    const EvenOdd m = load_codes(of_m.codes + 16 * j), v = load_codes(of_v.codes + 16 * j);
    u.even[j] = updated_eight(2 * j, master.even, m.even, v.even, gradient.even);
    u.odd[j] = updated_eight(2 * j + 1, master.odd, m.odd, v.odd, gradient.odd);
    nan = _mm256_or_ps(nan, nan_of(u.even[j], u.odd[j]));
    bits.advance(u.random, MomentBits::begun + j, MomentBits::begun + j + 1);
  }
  bits.advance(u.random, MomentBits::begun + coded_block / 16, MomentBits::rounds);
  return _mm256_movemask_ps(nan) != 0;
}

/// Stores what update_coded() made of the elements from `i` on.
[[gnu::always_inline]] inline void store_coded(const AdamPiece& p, std::int64_t i, const CodedUpdate& u) {
  const CodedBlock of_m = coded_block_at(p.state.m, i), of_v = coded_block_at(p.state.v, i);
  const std::uint32_t m_exponent = numerics::m_exponent(largest_of(u.largest_m));
  const std::uint32_t v_exponent = numerics::v_exponent(largest_of(u.largest_v));
  const __m256 scale = power(254 - m_exponent);
  const __m256i below_v = all(8u - numerics::v_base(v_exponent));
  const RandomWords random = MomentBits::words_of(u.random);
  for (int line = 0; line < 2; ++line) {
    __m256i m[2], v[2], signs[2];
    for (int k = 0; k < 2; ++k) {
      const int j = 2 * line + k;
      const Eight &even = u.even[j], &odd = u.odd[j];
      store_masters(p, i + 16 * j, even.master, odd.master);
      const EvenOdd of_its_m = increments(random.of[j], all(below_m));
      const EvenOdd of_its_v = increments(exchanged(random.of[j]), below_v);
      m[k] = codes_of(place_of_m(even.m, scale, of_its_m.even), place_of_m(odd.m, scale, of_its_m.odd));
      signs[k] = narrow_both({_mm256_castps_si256(even.m), _mm256_castps_si256(odd.m)});
      v[k] = codes_of(place_of_v(even.v, of_its_v.even), place_of_v(odd.v, of_its_v.odd));
    }
    // Narrowing bounds codes by the last there is, and makes of numbers with a sign bytes that have it.
    const __m256i sign = _mm256_and_si256(_mm256_packs_epi16(signs[0], signs[1]), _mm256_set1_epi8(-0x80));
    const __m256i m_codes = in_order(_mm256_or_si256(_mm256_packs_epi16(m[0], m[1]), sign));
    const __m256i v_codes = in_order(_mm256_packus_epi16(v[0], v[1]));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(of_m.codes + 32 * line), m_codes);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(of_v.codes + 32 * line), v_codes);
  }
  *of_m.exponent = static_cast<std::uint8_t>(m_exponent);
  *of_v.exponent = static_cast<std::uint8_t>(v_exponent);
}

/// numerics::adamw_block of 64 elements from `i` on. `watcher` is also told that all will be stored. Returns false,
/// with nothing stored, where an element becomes NaN.
template <class Watcher>
[[gnu::always_inline]] inline bool adamw_coded(const AdamPiece& p, std::int64_t i, const Coefficients& c,
                                               const MomentBits& bits, Watcher& watcher) {
  CodedUpdate u;
  if (update_coded(p, i, c, bits, watcher, u)) [[unlikely]]
    return false;
  watcher.store();
  store_coded(p, i, u);
  return true;
}

}  // namespace
}  // namespace tandem::kernels
