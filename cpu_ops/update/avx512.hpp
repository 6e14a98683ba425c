#pragma once
// AVX-512 for updates: what their kernels share. Included behind the headers that they need, where the target is
// AVX-512.
#include <immintrin.h>

#include "cpu_ops/update/adam_kernels.hpp"

namespace tandem::kernels {
namespace {

inline __m512 floats(__m512i bits) { return _mm512_castsi512_ps(bits); }

inline __m512i all(std::uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
inline __m512i magnitude_of(__m512 x) { return _mm512_and_si512(_mm512_castps_si512(x), all(0x7fffffffu)); }
inline __m512 power(std::uint32_t exponent) { return floats(all(exponent << numerics::below_exponent)); }
/// a | (b & mask)
inline __m512i or_masked(__m512i a, __m512i b, __m512i mask) { return _mm512_ternarylogic_epi32(a, b, mask, 0xf8); }

struct Coefficients {
  explicit Coefficients(const AdamCoefficients& c)
      : gradient_scale(_mm512_set1_ps(c.gradient_scale)),
        beta1(_mm512_set1_ps(c.beta1)),
        one_minus_beta1(_mm512_set1_ps(c.one_minus_beta1)),
        beta2(_mm512_set1_ps(c.beta2)),
        one_minus_beta2(_mm512_set1_ps(c.one_minus_beta2)),
        inv_sqrt_correction2(_mm512_set1_ps(c.inv_sqrt_correction2)),
        eps(_mm512_set1_ps(c.eps)),
        minus_step_size(_mm512_set1_ps(c.minus_step_size)),
        minus_lr(_mm512_set1_ps(c.minus_lr)),
        minus_decay(_mm512_set1_ps(c.minus_decay)) {}
  __m512 gradient_scale, beta1, one_minus_beta1, beta2, one_minus_beta2, inv_sqrt_correction2, eps, minus_step_size,
      minus_lr, minus_decay;
};

inline __m512 widen(__m256i bits) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16)); }

/// numerics::weight_of_master, sixteen at once.
inline __m256i weight_of_master(__m512 master) {
  const __m512i bits = _mm512_castps_si512(master);
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x8000)), 16);
  const __m512i quiet = _mm512_or_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
  const __mmask16 nan = _mm512_cmp_ps_mask(master, master, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_blend_epi32(nan, rounded, quiet));
}

inline const std::byte* at(const void* array, std::int64_t i, std::size_t bytes) {
  return static_cast<const std::byte*>(array) + static_cast<std::size_t>(i) * bytes;
}
template <class T>
inline T* element(void* array, std::int64_t i) {
  return static_cast<T*>(array) + i;
}

/// numerics::join_master, sixteen at once.
inline __m512 join_master(__m256i weight, __m256i residual) {
  const __m512i low = _mm512_cvtepu16_epi32(residual);
  const __m512i high = _mm512_sub_epi32(_mm512_cvtepu16_epi32(weight), _mm512_srli_epi32(low, 15));
  return _mm512_castsi512_ps(_mm512_or_si512(_mm512_slli_epi32(high, 16), low));
}

inline __m256i load_bf16(const void* array, std::int64_t i) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at(array, i, 2)));
}
inline void store_bf16(void* array, std::int64_t i, __m256i bits) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(element<bf16>(array, i)), bits);
}

/// Gradient, scaled, new moments and direction of sixteen elements.
struct Step {
  __m512 g, m, v, direction;
};

/// numerics::adam_m, adam_v and adam_direction.
[[gnu::always_inline]] inline Step step_of(__m512 m, __m512 v, __m512 gradient, const Coefficients& c) {
  const __m512 g = _mm512_mul_ps(gradient, c.gradient_scale);
  const __m512 new_m = _mm512_fmadd_ps(c.beta1, m, _mm512_mul_ps(c.one_minus_beta1, g));
  const __m512 new_v = _mm512_fmadd_ps(_mm512_mul_ps(c.one_minus_beta2, g), g, _mm512_mul_ps(c.beta2, v));
  const __m512 denominator = _mm512_fmadd_ps(_mm512_sqrt_ps(new_v), c.inv_sqrt_correction2, c.eps);
  return {g, new_m, new_v, _mm512_div_ps(new_m, denominator)};
}
/// numerics::adam_master.
[[gnu::always_inline]] inline __m512 moved(__m512 master, __m512 direction, const Coefficients& c) {
  return _mm512_fmadd_ps(c.minus_step_size, direction, _mm512_fmadd_ps(c.minus_decay, master, master));
}

/// The state of sixteen elements.
struct Sixteen {
  __m512 master, m, v;
};

/// numerics::adamw, sixteen at once.
[[gnu::always_inline]] inline Sixteen adamw(const Sixteen& old, __m512 gradient, const Coefficients& c) {
  const Step step = step_of(old.m, old.v, gradient, c);
  return {moved(old.master, step.direction, c), step.m, step.v};
}

/// Watcher of an update of which no record is made.
struct Unrecorded {
  void update(int /*vector*/, __m512 /*old_master*/, const Step& /*step*/, __m512 /*master*/) {}
  void store() {}
  void store_moments(std::int64_t /*first*/, __m512i /*m*/, __m512i /*v*/) {}
};

/// Lanes in which one of two has a NaN: that of a moment reaches the master.
inline __mmask16 nan_of(const Sixteen& a, const Sixteen& b) {
  return _mm512_cmp_ps_mask(a.master, b.master, _CMP_UNORD_Q);
}

// -- random bits

/// 32 bits each of the even and the odd elements of 32.
struct EvenOdd {
  __m512i even, odd;
};

constexpr __mmask32 upper_halves = 0xaaaaaaaa;

inline EvenOdd widen_both(const void* array, std::int64_t i) {
  const __m512i bits = _mm512_loadu_si512(at(array, i, 2));
  return {_mm512_slli_epi32(bits, 16), _mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0xffff0000)))};
}
/// The upper halves, in order.
inline __m512i narrow_both(const EvenOdd& x) {
  return _mm512_mask_blend_epi16(upper_halves, _mm512_srli_epi32(x.even, 16), x.odd);
}
/// The lower halves, in order.
inline __m512i lower_halves_of(const EvenOdd& x) {
  return _mm512_mask_blend_epi16(upper_halves, x.even, _mm512_slli_epi32(x.odd, 16));
}
inline EvenOdd join_both(const void* weight, const void* residual, std::int64_t i) {
  const __m512i low = _mm512_loadu_si512(at(residual, i, 2));
  const __m512i high = _mm512_sub_epi16(_mm512_loadu_si512(at(weight, i, 2)), _mm512_srli_epi16(low, 15));
  return {_mm512_mask_blend_epi16(upper_halves, low, _mm512_slli_epi32(high, 16)),
          _mm512_mask_blend_epi16(upper_halves, _mm512_srli_epi32(low, 16), high)};
}

/// Residuals and weights of 32 masters, none of them NaN.
inline void store_masters(const AdamPiece& p, std::int64_t i, __m512 even, __m512 odd) {
  const EvenOdd master{_mm512_castps_si512(even), _mm512_castps_si512(odd)};
  const __m512i half = _mm512_set1_epi32(0x8000);
  const EvenOdd weight{_mm512_add_epi32(master.even, half), _mm512_add_epi32(master.odd, half)};
  _mm512_storeu_si512(element<bf16>(p.state.master, i), lower_halves_of(master));
  _mm512_storeu_si512(p.weight + i, narrow_both(weight));
}

/// `x` in every lane.
inline __m512i spread(std::uint64_t x) { return _mm512_set1_epi64(static_cast<long long>(x)); }

/// Two words of the generator's state in each 64-bit lane, the even one below.
struct RandomState {
  __m512i words01, words23;
};

/// The new words: a product's halves in the other order, the old upper word, the key.
inline __m512i next_words(__m512i product, __m512i words, __m512i key) {
  constexpr int three_way_xor = 0x96;
  const __m512i swapped = _mm512_shuffle_epi32(product, _MM_PERM_CDAB);
  return _mm512_ternarylogic_epi64(swapped, _mm512_srli_epi64(words, 32), key, three_way_xor);
}

/// A round on eight blocks.
inline RandomState philox_round(const RandomState& s, __m512i key0, __m512i key1) {
  const __m512i product0 = _mm512_mul_epu32(s.words01, spread(numerics::philox_multiplier0));
  const __m512i product1 = _mm512_mul_epu32(s.words23, spread(numerics::philox_multiplier1));
  return {next_words(product1, s.words01, key0), next_words(product0, s.words23, key1)};
}

struct TwoVectors {
  __m512i of[2];
};

/// Draws numerics::moment_bits.
class MomentBits {
 public:
  /// Fastest for blocks near `first`.
  MomentBits(const AdamCoefficients& c, std::uint64_t first) : of_(c, first) {}

  /// Draws the bits of 32 elements from `first`, a multiple of 32: eight blocks of the generator.
  EvenOdd draw(std::uint64_t first) const {
    const RandomState s = rounds(first / numerics::elements_per_block, _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7));
    constexpr __mmask16 lower_words = 0x5555, upper_words = 0xaaaa;
    return {_mm512_mask_shuffle_epi32(s.words01, upper_words, s.words23, _MM_PERM_CDAB),
            _mm512_mask_shuffle_epi32(s.words23, lower_words, s.words01, _MM_PERM_CDAB)};
  }
  /// The words of eight blocks from `block` on, in order.
  TwoVectors words(std::uint64_t block) const {
    // In this order of lanes, blocks follow one another when 64-bit lanes are interleaved within 128 bits.
    const RandomState s = rounds(block, _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7));
    return {{_mm512_unpacklo_epi64(s.words01, s.words23), _mm512_unpackhi_epi64(s.words01, s.words23)}};
  }

 private:
  /// Eight blocks from `block` on, in the order of `lanes`.
  RandomState rounds(std::uint64_t block, __m512i lanes) const {
    const __m512i numbers = _mm512_add_epi64(spread(block), lanes);
    if (!of_.hold_for(block, 8)) [[unlikely]]
      return rounds_from(0, {numbers, spread(of_.step)});
    const __m512i words23 =
        _mm512_xor_si512(exchanged_product(numbers, numerics::philox_multiplier0), spread(of_.first23));
    return rounds_from(
        2, {_mm512_xor_si512(exchanged_product(words23, numerics::philox_multiplier1), spread(of_.second01)),
            _mm512_xor_si512(_mm512_srli_epi64(words23, 32), spread(of_.second23))});
  }
  RandomState rounds_from(int round, RandomState s) const {
    for (; round < numerics::philox_fewest_rounds; ++round) {
      s = philox_round(s, spread(of_.key[round].word0), spread(of_.key[round].word1));
    }
    return s;
  }
  static __m512i exchanged_product(__m512i words, std::uint32_t factor) {
    return _mm512_shuffle_epi32(_mm512_mul_epu32(words, spread(factor)), _MM_PERM_CDAB);
  }
  RandomRounds of_;
};

// -- moments in a byte

/// Codes of 32 elements, each `below_code` bits up.
inline EvenOdd load_codes(const std::uint8_t* codes) {
  static_assert(numerics::below_code == 16 + 4);
  const __m512i halves =
      _mm512_slli_epi16(_mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes))), 4);
  return {_mm512_slli_epi32(halves, 16), _mm512_and_si512(halves, all(0xffff0000u))};
}
/// numerics::random_increment of the halves of words.
inline EvenOdd increments(__m512i words) {
  return {or_masked(all(8), _mm512_slli_epi32(words, 4), all(0xffff0)),
          or_masked(all(8), _mm512_srli_epi32(words, 12), all(0xffff0))};
}
/// numerics::m_at in a block whose power of two is `scale`.
inline __m512 m_at(__m512i place, __m512 scale) {
  const __m512 above = floats(_mm512_add_epi32(place, all(numerics::m_linear_bits)));
  const __m512 linear = _mm512_sub_ps(above, _mm512_set1_ps(numerics::m_linear_below));
  const __m512i normal = _mm512_add_epi32(place, all(numerics::m_linear_bits - numerics::m_binade));
  return _mm512_mul_ps(_mm512_min_ps(linear, floats(normal)), scale);
}
/// numerics::place_of_m; `scale`: 1 over the block's power of two.
inline __m512i place_of_m(__m512 m, __m512 scale) {
  const __m512 relative = _mm512_mul_ps(floats(magnitude_of(m)), scale);
  const __m512 above = _mm512_add_ps(relative, _mm512_set1_ps(numerics::m_linear_below));
  const __m512i normal = _mm512_add_epi32(_mm512_castps_si512(relative), all(numerics::m_binade));
  return _mm512_sub_epi32(_mm512_max_epu32(_mm512_castps_si512(above), normal), all(numerics::m_linear_bits));
}
inline __m512 decode_m(__m512i code, __m512 scale) {
  const __m512i place = _mm512_and_si512(code, all(numerics::most_m_code << numerics::below_code));
  const __m512i m = _mm512_castps_si512(m_at(place, scale));
  return floats(or_masked(m, _mm512_slli_epi32(code, 4), all(0x80000000u)));
}
inline __m512 decode_v(__m512i code, __m512i base) {
  return floats(_mm512_maskz_add_epi32(_mm512_test_epi32_mask(code, code), code, base));
}

/// The halves with their bytes exchanged.
inline __m512i exchanged(__m512i words) {
  return _mm512_shuffle_epi8(words, _mm512_set4_epi32(0x0e0f0c0d, 0x0a0b0809, 0x06070405, 0x02030001));
}

/// Codes in the bits from `low` on, with others below.
template <int low>
inline __m512i encode_m(__m512 m, __m512 scale, __m512i increment) {
  const __m512i code = _mm512_srli_epi32(_mm512_add_epi32(place_of_m(m, scale), increment), numerics::below_code - low);
  constexpr std::uint32_t most = ((numerics::most_m_code + 1) << low) - 1;
  return or_masked(_mm512_min_epu32(code, all(most)), _mm512_srli_epi32(_mm512_castps_si512(m), 24 - low),
                   all(0x80u << low));
}
template <int low>
inline __m512i encode_v(__m512 v, __m512i base, __m512i increment) {
  const __m512i magnitude = magnitude_of(v);
  const __m512i lowest = _mm512_add_epi32(base, all(1u << numerics::below_code));
  const __m512i rounded = _mm512_max_epu32(_mm512_add_epi32(magnitude, increment), lowest);
  const __m512i code = _mm512_srli_epi32(_mm512_sub_epi32(rounded, base), numerics::below_code - low);
  constexpr std::uint32_t most = ((numerics::most_v_code + 1) << low) - 1;
  return _mm512_maskz_min_epu32(_mm512_test_epi32_mask(magnitude, magnitude), code, all(most));
}

}  // namespace
}  // namespace tandem::kernels
