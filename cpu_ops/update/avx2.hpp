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

inline __m256i all(std::uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
inline __m256 floats(__m256i bits) { return _mm256_castsi256_ps(bits); }

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

// -- sixteen elements of 16 bits: the even and the odd ones of them apart, which are widened and narrowed by a shift or
// a mask each, where elements in order would have to be shuffled

/// 32 bits each of the even and the odd elements of sixteen.
struct EvenOdd {
  __m256i even, odd;
};
constexpr int upper_halves = 0xaa;

inline __m256i load_halves(const void* array, std::int64_t i) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(static_cast<const std::uint16_t*>(array) + i));
}
inline void store_halves(void* array, std::int64_t i, __m256i halves) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(static_cast<std::uint16_t*>(array) + i), halves);
}
/// Sixteen numbers of 16 bits in the upper halves.
inline EvenOdd in_upper_halves(__m256i halves) {
  return {_mm256_slli_epi32(halves, 16), _mm256_and_si256(halves, all(0xffff0000u))};
}
inline EvenOdd widen_both(const void* array, std::int64_t i) { return in_upper_halves(load_halves(array, i)); }
/// The upper halves, in order.
inline __m256i narrow_both(const EvenOdd& x) {
  return _mm256_blend_epi16(_mm256_srli_epi32(x.even, 16), x.odd, upper_halves);
}
/// The lower halves, in order.
inline __m256i lower_halves_of(const EvenOdd& x) {
  return _mm256_blend_epi16(x.even, _mm256_slli_epi32(x.odd, 16), upper_halves);
}
inline EvenOdd join_both(const void* weight, const void* residual, std::int64_t i) {
  const __m256i low = load_halves(residual, i);
  const __m256i high = _mm256_sub_epi16(load_halves(weight, i), _mm256_srli_epi16(low, 15));
  return {_mm256_blend_epi16(low, _mm256_slli_epi32(high, 16), upper_halves),
          _mm256_blend_epi16(_mm256_srli_epi32(low, 16), high, upper_halves)};
}
/// Residuals and weights of sixteen masters, none of them NaN.
inline void store_masters(const AdamPiece& p, std::int64_t i, __m256 even, __m256 odd) {
  const EvenOdd master{_mm256_castps_si256(even), _mm256_castps_si256(odd)};
  store_halves(p.state.master, i, lower_halves_of(master));
  store_halves(p.weight, i,
               narrow_both({_mm256_add_epi32(master.even, all(0x8000)), _mm256_add_epi32(master.odd, all(0x8000))}));
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

/// Watcher of an update of which no record is made.
struct Unrecorded {
  void update(int /*vector*/, __m256 /*old_master*/, const Step& /*step*/, __m256 /*master*/) {}
  void store() {}
  void store_moments(std::int64_t /*first*/, __m256i /*m*/, __m256i /*v*/) {}
};

/// The state of eight elements.
struct Eight {
  __m256 master, m, v;
};
/// All bits of lanes in which one has a NaN: that of a moment reaches the master.
inline __m256 nan_of(const Eight& a, const Eight& b) { return _mm256_cmp_ps(a.master, b.master, _CMP_UNORD_Q); }

// -- random bits

/// `x` in every lane.
inline __m256i spread(std::uint64_t x) { return _mm256_set1_epi64x(static_cast<long long>(x)); }

/// Lower 32-bit words of `a` and upper ones of `b`.
inline __m256i lower_and_upper(__m256i a, __m256i b) { return _mm256_blend_epi32(a, b, 0xaa); }
inline __m256i to_lower(__m256i x) { return _mm256_srli_epi64(x, 32); }
inline __m256i to_upper(__m256i x) { return _mm256_slli_epi64(x, 32); }

/// The generator's state: words 0 and 2 of a block in each 64-bit lane, and words 1 and 3.
struct RandomState {
  __m256i even, odd;
};

/// A round on four blocks.
inline RandomState philox_round(const RandomState& s, __m256i key) {
  const __m256i product0 = _mm256_mul_epu32(s.even, spread(numerics::philox_multiplier0));
  const __m256i product1 = _mm256_mul_epu32(to_lower(s.even), spread(numerics::philox_multiplier1));
  return {_mm256_xor_si256(lower_and_upper(to_lower(product1), product0), _mm256_xor_si256(s.odd, key)),
          lower_and_upper(product1, to_upper(product0))};
}

/// The words of eight blocks, in order.
struct RandomWords {
  __m256i of[4];
};

/// Draws numerics::moment_bits.
class MomentBits {
 public:
  /// Fastest for blocks near `first`.
  MomentBits(const AdamCoefficients& c, std::uint64_t first)
      : of_(c, first), second_even_(of_.second01 | of_.second23 << 32), second_odd_(of_.second23) {
    for (int i = 0; i < numerics::philox_fewest_rounds; ++i) keys_[i] = of_.key[i].word0 | of_.key[i].word1 << 32;
  }

  /// Two times four blocks that are being drawn. A round waits for the one before: kernels do other work between
  /// rounds.
  struct Blocks {
    RandomState low, high;
  };
  static constexpr int begun = 2;  ///< rounds that are behind blocks which begin
  static constexpr int rounds = numerics::philox_fewest_rounds;

  /// Begins the words of eight blocks from `block` on.
  Blocks begin_words(std::uint64_t block) const {
    // In this order of lanes, blocks follow one another when words are interleaved within 128 bits.
    return begin(block, _mm256_setr_epi64x(0, 2, 1, 3));
  }
  /// Begins the bits of 32 elements from `first` on, a multiple of 32.
  Blocks begin_bits(std::uint64_t first) const {
    return begin(first / numerics::elements_per_block, _mm256_setr_epi64x(0, 1, 2, 3));
  }
  /// Rounds from `round` to `end`, which is none of them.
  void advance(Blocks& blocks, int round, int end) const {
    for (; round < end; ++round) {
      const __m256i key = spread(keys_[round]);
      blocks = {philox_round(blocks.low, key), philox_round(blocks.high, key)};
    }
  }
  /// Words of blocks after all rounds.
  static RandomWords words_of(const Blocks& b) {
    return {{_mm256_unpacklo_epi32(b.low.even, b.low.odd), _mm256_unpackhi_epi32(b.low.even, b.low.odd),
             _mm256_unpacklo_epi32(b.high.even, b.high.odd), _mm256_unpackhi_epi32(b.high.even, b.high.odd)}};
  }

 private:
  /// Eight blocks from `block` on, each four in the order of `lanes`.
  Blocks begin(std::uint64_t block, __m256i lanes) const {
    const __m256i low = _mm256_add_epi64(spread(block), lanes), high = _mm256_add_epi64(low, spread(4));
    if (of_.hold_for(block, 8)) [[likely]]
      return {second(low), second(high)};
    Blocks blocks{first(low), first(high)};
    advance(blocks, 0, begun);
    return blocks;
  }
  RandomState first(__m256i numbers) const {
    const __m256i step = spread(of_.step);
    return {lower_and_upper(numbers, to_upper(step)), lower_and_upper(to_lower(numbers), step)};
  }
  /// State after two rounds, where their constants hold.
  RandomState second(__m256i numbers) const {
    const __m256i product0 = _mm256_mul_epu32(numbers, spread(numerics::philox_multiplier0));
    const __m256i word2 = _mm256_xor_si256(to_lower(product0), spread(of_.first23));
    const __m256i product1 = _mm256_mul_epu32(word2, spread(numerics::philox_multiplier1));
    return {_mm256_xor_si256(lower_and_upper(to_lower(product1), to_upper(product0)), spread(second_even_)),
            lower_and_upper(product1, spread(second_odd_))};
  }
  RandomRounds of_;
  std::uint64_t second_even_, second_odd_;
  std::uint64_t keys_[numerics::philox_fewest_rounds];
};

// -- moments in a byte, eight at once

inline __m256i magnitude_of(__m256 x) { return _mm256_and_si256(_mm256_castps_si256(x), all(0x7fffffffu)); }
inline __m256 power(std::uint32_t exponent) { return _mm256_castsi256_ps(all(exponent << numerics::below_exponent)); }
/// Codes of sixteen elements, each `below_code` bits up.
inline EvenOdd load_codes(const std::uint8_t* codes) {
  static_assert(numerics::below_code == 16 + 4);
  const __m256i halves = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
  return in_upper_halves(_mm256_slli_epi16(halves, 4));
}

/// numerics::m_at in a block whose power of two is `scale`.
inline __m256 m_at(__m256i place, __m256 scale) {
  const __m256 above = _mm256_castsi256_ps(_mm256_add_epi32(place, all(numerics::m_linear_bits)));
  const __m256 linear = _mm256_sub_ps(above, _mm256_set1_ps(numerics::m_linear_below));
  const __m256i normal = _mm256_add_epi32(place, all(numerics::m_linear_bits - numerics::m_binade));
  return _mm256_mul_ps(_mm256_min_ps(linear, _mm256_castsi256_ps(normal)), scale);
}
/// Codes are `below_code` bits up.
inline __m256 decode_m(__m256i code, __m256 scale) {
  const __m256 m = m_at(_mm256_and_si256(code, all(numerics::most_m_code << numerics::below_code)), scale);
  const __m256i sign = _mm256_and_si256(_mm256_slli_epi32(code, 24 - numerics::below_code), all(0x80000000u));
  return _mm256_or_ps(m, _mm256_castsi256_ps(sign));
}
/// The sign of a code, which has none, makes 0 of code 0.
inline __m256 decode_v(__m256i code, __m256i base) {
  return floats(_mm256_sign_epi32(_mm256_add_epi32(code, base), code));
}

/// numerics::random_increment of the halves of words, and another number added.
inline EvenOdd increments(__m256i words, __m256i less_eight) {
  const __m256i sixteen_bits = all(0xffff0);
  return {_mm256_add_epi32(_mm256_and_si256(_mm256_slli_epi32(words, 4), sixteen_bits), less_eight),
          _mm256_add_epi32(_mm256_and_si256(_mm256_srli_epi32(words, 12), sixteen_bits), less_eight)};
}
/// Added to random_increment() less 8, so that places of m count from its lowest code.
constexpr std::uint32_t below_m = 8u - numerics::m_linear_bits;

/// Magnitudes of codes of m with bits below, not yet at most the last; `increment` has below_m in it.
inline __m256i place_of_m(__m256 m, __m256 scale, __m256i increment) {
  const __m256 relative = _mm256_mul_ps(floats(magnitude_of(m)), scale);
  const __m256 above = _mm256_add_ps(relative, _mm256_set1_ps(numerics::m_linear_below));
  const __m256i normal = _mm256_add_epi32(_mm256_castps_si256(relative), all(numerics::m_binade));
  return _mm256_add_epi32(_mm256_max_epu32(_mm256_castps_si256(above), normal), increment);
}
/// numerics::place_of_m; `scale`: 1 over the block's power of two.
inline __m256i place_of_m(__m256 m, __m256 scale) { return place_of_m(m, scale, all(0u - numerics::m_linear_bits)); }
/// Codes of v with bits below; `increment` has 8 less the block's base in it.
inline __m256i place_of_v(__m256 v, __m256i increment) {
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i least = _mm256_sign_epi32(all(1u << numerics::below_code), bits);  // 0 where v is
  return _mm256_max_epi32(_mm256_add_epi32(bits, increment), least);
}
/// Codes from places of sixteen elements, in 16 bits each.
inline __m256i codes_of(__m256i even, __m256i odd) {
  return _mm256_blend_epi16(_mm256_srli_epi32(even, numerics::below_code),
                            _mm256_srli_epi32(odd, numerics::below_code - 16), upper_halves);
}
/// Bytes of two vectors of 16-bit numbers that were narrowed within 128 bits.
inline __m256i in_order(__m256i dealt) { return _mm256_permute4x64_epi64(dealt, _MM_SHUFFLE(3, 1, 2, 0)); }

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

}  // namespace
}  // namespace tandem::kernels
