#pragma once
// AVX2 for updates: what their kernels share. Included behind the headers that they need, where the target is AVX2.
#include <immintrin.h>

#include "cpu_ops/update/adam_kernels.hpp"

namespace tandem::kernels {
namespace {

struct Coefficients {
  explicit Coefficients(const AdamCoefficients& c)
      : gradient_scale(_mm256_set1_ps(c.gradient_scale)),
        beta1(_mm256_set1_ps(c.beta1)),
        one_minus_beta1(_mm256_set1_ps(c.one_minus_beta1)),
        beta2(_mm256_set1_ps(c.beta2)),
        one_minus_beta2(_mm256_set1_ps(c.one_minus_beta2)),
        inv_sqrt_correction2(_mm256_set1_ps(c.inv_sqrt_correction2)),
        eps(_mm256_set1_ps(c.eps)),
        minus_step_size(_mm256_set1_ps(c.minus_step_size)),
        minus_lr(_mm256_set1_ps(c.minus_lr)),
        minus_decay(_mm256_set1_ps(c.minus_decay)) {}
  __m256 gradient_scale, beta1, one_minus_beta1, beta2, one_minus_beta2, inv_sqrt_correction2, eps, minus_step_size,
      minus_lr, minus_decay;
};

inline __m256 widen(const bf16* p) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

/// numerics::weight_of_master, eight at once.
inline __m128i weight_of_master(__m256 master) {
  const __m256i bits = _mm256_castps_si256(master);
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x8000)), 16);
  const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(master, master, _CMP_UNORD_Q));
  const __m256i weight = _mm256_blendv_epi8(rounded, quiet, nan);
  return _mm_packus_epi32(_mm256_castsi256_si128(weight), _mm256_extracti128_si256(weight, 1));
}

template <class T>
inline T* element(void* array, std::int64_t i) {
  return static_cast<T*>(array) + i;
}

inline __m256i widen_bits(const void* p) {
  return _mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}

/// The low halves of eight 32-bit values.
inline __m128i low_halves(__m256i x) {
  const __m256i low = _mm256_and_si256(x, _mm256_set1_epi32(0xffff));
  return _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
}

/// numerics::join_master, eight at once.
inline __m256 join_master(const bf16* weight, const std::uint16_t* residual) {
  const __m256i low = widen_bits(residual);
  const __m256i high = _mm256_sub_epi32(widen_bits(weight), _mm256_srli_epi32(low, 15));
  return _mm256_castsi256_ps(_mm256_or_si256(_mm256_slli_epi32(high, 16), low));
}

/// Gradient, scaled, new moments and direction of eight elements.
struct Step {
  __m256 g, m, v, direction;
};

/// numerics::adam_m, adam_v and adam_direction.
[[gnu::always_inline]] inline Step step_of(__m256 m, __m256 v, __m256 gradient, const Coefficients& c) {
  const __m256 g = _mm256_mul_ps(gradient, c.gradient_scale);
  const __m256 new_m = _mm256_fmadd_ps(c.beta1, m, _mm256_mul_ps(c.one_minus_beta1, g));
  const __m256 new_v = _mm256_fmadd_ps(_mm256_mul_ps(c.one_minus_beta2, g), g, _mm256_mul_ps(c.beta2, v));
  const __m256 denominator = _mm256_fmadd_ps(_mm256_sqrt_ps(new_v), c.inv_sqrt_correction2, c.eps);
  return {g, new_m, new_v, _mm256_div_ps(new_m, denominator)};
}
/// numerics::adam_master.
[[gnu::always_inline]] inline __m256 moved(__m256 master, __m256 direction, const Coefficients& c) {
  return _mm256_fmadd_ps(c.minus_step_size, direction, _mm256_fmadd_ps(c.minus_decay, master, master));
}

// -- random bits

/// `x` in every lane.
inline __m256i spread(std::uint64_t x) { return _mm256_set1_epi64x(static_cast<long long>(x)); }

/// Two words of the generator's state in each 64-bit lane, the even one below.
struct RandomState {
  __m256i words01, words23;
};

/// The new words: a product's halves in the other order, the old upper word, the key.
inline __m256i next_words(__m256i product, __m256i words, __m256i key) {
  const __m256i swapped = _mm256_shuffle_epi32(product, _MM_SHUFFLE(2, 3, 0, 1));
  return _mm256_xor_si256(swapped, _mm256_xor_si256(_mm256_srli_epi64(words, 32), key));
}

/// A round on four blocks.
inline RandomState philox_round(const RandomState& s, __m256i key0, __m256i key1) {
  const __m256i product0 = _mm256_mul_epu32(s.words01, spread(numerics::philox_multiplier0));
  const __m256i product1 = _mm256_mul_epu32(s.words23, spread(numerics::philox_multiplier1));
  return {next_words(product1, s.words01, key0), next_words(product0, s.words23, key1)};
}

/// numerics::moment_bits of 32 elements: four vectors of 8.
struct RandomBits {
  __m256i of[4];
};

/// Draws them.
class MomentBits {
 public:
  explicit MomentBits(const AdamCoefficients& c) : keys_(c.seed), step_(spread(c.step)) {}

  /// Draws the bits of eight blocks of elements from `first` on: four vectors of 8.
  RandomBits draw(std::uint64_t first) const {
    // In this order of lanes, blocks follow one another when 64-bit lanes are interleaved within 128 bits.
    const __m256i lanes = _mm256_setr_epi64x(0, 2, 1, 3);
    RandomState low{_mm256_add_epi64(spread(first), lanes), step_};
    RandomState high{_mm256_add_epi64(spread(first + 4), lanes), step_};
    for (const RoundKey& key : keys_.of) {
      const __m256i key0 = spread(key.word0);
      const __m256i key1 = spread(key.word1);
      low = philox_round(low, key0, key1);
      high = philox_round(high, key0, key1);
    }
    return {{_mm256_unpacklo_epi64(low.words01, low.words23), _mm256_unpackhi_epi64(low.words01, low.words23),
             _mm256_unpacklo_epi64(high.words01, high.words23), _mm256_unpackhi_epi64(high.words01, high.words23)}};
  }

 private:
  RoundKeys keys_;
  __m256i step_;
};

// -- moments in a byte, eight at once

inline __m256i all(std::uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
inline __m256i magnitude_of(__m256 x) { return _mm256_and_si256(_mm256_castps_si256(x), all(0x7fffffffu)); }
inline __m256 power(std::uint32_t exponent) { return _mm256_castsi256_ps(all(exponent << numerics::below_exponent)); }
/// Eight codes, each `below_code` bits up.
inline __m256i load_codes(const std::uint8_t* codes) {
  return _mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes))),
                           numerics::below_code);
}

/// Codes are `below_code` bits up.
inline __m256 decode_m(__m256i code, __m256 scale) {
  const __m256i place = _mm256_and_si256(code, all(numerics::most_m_code << numerics::below_code));
  const __m256 above = _mm256_castsi256_ps(_mm256_add_epi32(place, all(numerics::m_linear_bits)));
  const __m256 linear = _mm256_sub_ps(above, _mm256_set1_ps(numerics::m_linear_below));
  const __m256i normal = _mm256_add_epi32(place, all(numerics::m_linear_bits - numerics::m_binade));
  const __m256 m = _mm256_mul_ps(_mm256_min_ps(linear, _mm256_castsi256_ps(normal)), scale);
  const __m256i sign = _mm256_and_si256(_mm256_slli_epi32(code, 24 - numerics::below_code), all(0x80000000u));
  return _mm256_or_ps(m, _mm256_castsi256_ps(sign));
}
inline __m256 decode_v(__m256i code, __m256i base) {
  const __m256i zero = _mm256_cmpeq_epi32(code, _mm256_setzero_si256());
  return _mm256_castsi256_ps(_mm256_andnot_si256(zero, _mm256_add_epi32(code, base)));
}

/// numerics::random_increment of eight 16-bit numbers.
inline __m256i increment(__m256i bits) { return _mm256_or_si256(_mm256_slli_epi32(bits, 4), all(8)); }

/// A code in each lane.
inline __m256i encode_m(__m256 m, __m256 scale, __m256i increment) {
  const __m256 relative = _mm256_mul_ps(_mm256_castsi256_ps(magnitude_of(m)), scale);
  const __m256 above = _mm256_add_ps(relative, _mm256_set1_ps(numerics::m_linear_below));
  const __m256i normal = _mm256_add_epi32(_mm256_castps_si256(relative), all(numerics::m_binade));
  const __m256i larger = _mm256_max_epu32(_mm256_castps_si256(above), normal);
  const __m256i place = _mm256_sub_epi32(larger, all(numerics::m_linear_bits));
  const __m256i code = _mm256_srli_epi32(_mm256_add_epi32(place, increment), numerics::below_code);
  const __m256i sign = _mm256_slli_epi32(_mm256_srli_epi32(_mm256_castps_si256(m), 31), 7);
  return _mm256_or_si256(_mm256_min_epu32(code, all(numerics::most_m_code)), sign);
}
inline __m256i encode_v(__m256 v, __m256i base, __m256i increment) {
  const __m256i magnitude = magnitude_of(v);
  const __m256i zero = _mm256_cmpeq_epi32(magnitude, _mm256_setzero_si256());
  const __m256i lowest = _mm256_add_epi32(base, all(1u << numerics::below_code));
  const __m256i rounded = _mm256_max_epu32(_mm256_add_epi32(magnitude, increment), lowest);
  const __m256i code = _mm256_srli_epi32(_mm256_sub_epi32(rounded, base), numerics::below_code);
  return _mm256_andnot_si256(zero, _mm256_min_epu32(code, all(numerics::most_v_code)));
}
/// The codes of 32 elements in lanes of four vectors, in order.
inline __m256i narrow(const __m256i (&code)[4]) {
  const __m256i dealt =
      _mm256_packus_epi16(_mm256_packus_epi32(code[0], code[1]), _mm256_packus_epi32(code[2], code[3]));
  return _mm256_permutevar8x32_epi32(dealt, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}
inline std::uint32_t largest_of(__m256i x) {
  __m128i most = _mm_max_epu32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  most = _mm_max_epu32(most, _mm_shuffle_epi32(most, _MM_SHUFFLE(1, 0, 3, 2)));
  most = _mm_max_epu32(most, _mm_shuffle_epi32(most, _MM_SHUFFLE(2, 3, 0, 1)));
  return static_cast<std::uint32_t>(_mm_cvtsi128_si32(most));
}

/// Bytes of 16-bit numbers exchanged.
inline __m256i exchanged(__m256i words) {
  constexpr std::int64_t lower = 0x0607040502030001, upper = 0x0e0f0c0d0a0b0809;
  return _mm256_shuffle_epi8(words, _mm256_setr_epi64x(lower, upper, lower, upper));
}
/// The 16-bit numbers of a vector's lower or upper half, a lane each.
inline __m256i halves(__m256i x, int upper) {
  return _mm256_cvtepu16_epi32(upper != 0 ? _mm256_extracti128_si256(x, 1) : _mm256_castsi256_si128(x));
}

}  // namespace
}  // namespace tandem::kernels
