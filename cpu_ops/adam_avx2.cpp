#include <immintrin.h>

#include "core/numerics/norm_block.hpp"
#include "cpu_ops/adam_kernels.hpp"

// From here on only: inline functions of the headers above stay compiled for any processor.
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif

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
        minus_decay(_mm256_set1_ps(c.minus_decay)) {}
  __m256 gradient_scale, beta1, one_minus_beta1, beta2, one_minus_beta2, inv_sqrt_correction2, eps, minus_step_size,
      minus_decay;
};

__m256 widen(const bf16* p) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

/// numerics::weight_of_master, eight at once.
__m128i weight_of_master(__m256 master) {
  const __m256i bits = _mm256_castps_si256(master);
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x8000)), 16);
  const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(master, master, _CMP_UNORD_Q));
  const __m256i weight = _mm256_blendv_epi8(rounded, quiet, nan);
  return _mm_packus_epi32(_mm256_castsi256_si128(weight), _mm256_extracti128_si256(weight, 1));
}

template <class T>
T* element(void* array, std::int64_t i) {
  return static_cast<T*>(array) + i;
}

__m256i widen_bits(const void* p) { return _mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p))); }

/// The low halves of eight 32-bit values.
__m128i low_halves(__m256i x) {
  const __m256i low = _mm256_and_si256(x, _mm256_set1_epi32(0xffff));
  return _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
}

/// numerics::join_master, eight at once.
__m256 join_master(const bf16* weight, const std::uint16_t* residual) {
  const __m256i low = widen_bits(residual);
  const __m256i high = _mm256_sub_epi32(widen_bits(weight), _mm256_srli_epi32(low, 15));
  return _mm256_castsi256_ps(_mm256_or_si256(_mm256_slli_epi32(high, 16), low));
}

/// numerics::round_stochastically, eight at once; `bits` below 2^16.
__m128i round_stochastically(__m256 x, __m256i bits) {
  const __m256i all = _mm256_castps_si256(x);
  const __m256i exponent = _mm256_set1_epi32(0x7f800000);
  const __m256i special = _mm256_cmpeq_epi32(_mm256_and_si256(all, exponent), exponent);
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(all, _mm256_andnot_si256(special, bits)), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return low_halves(_mm256_or_si256(rounded, _mm256_and_si256(nan, _mm256_set1_epi32(0x40))));
}

template <StateFormat format>
__m256 load_master(const AdamPiece& p, std::int64_t i) {
  if constexpr (format == StateFormat::fp32) return _mm256_loadu_ps(element<float>(p.state.master, i));
  return join_master(p.weight + i, element<std::uint16_t>(p.state.master, i));
}
template <StateFormat format>
void store_master(const AdamPiece& p, std::int64_t i, __m256 master) {
  if constexpr (format == StateFormat::fp32) {
    _mm256_storeu_ps(element<float>(p.state.master, i), master);
  } else {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(element<std::uint16_t>(p.state.master, i)),
                     low_halves(_mm256_castps_si256(master)));
  }
}
template <StateFormat format>
__m256 load_moment(void* array, std::int64_t i) {
  if constexpr (format == StateFormat::bf16_moments) return widen(element<bf16>(array, i));
  return _mm256_loadu_ps(element<float>(array, i));
}
template <StateFormat format>
void store_moment(void* array, std::int64_t i, __m256 moment, __m256i random) {
  if constexpr (format == StateFormat::bf16_moments) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(element<bf16>(array, i)), round_stochastically(moment, random));
  } else {
    _mm256_storeu_ps(element<float>(array, i), moment);
  }
}

/// `random`: numerics::moment_bits of the elements, where the format wants them.
template <StateFormat format>
void adamw_eight(const AdamPiece& p, std::int64_t i, const Coefficients& c, __m256i random) {
  const __m256 g = _mm256_mul_ps(widen(p.gradient + i), c.gradient_scale);
  const __m256 old_m = load_moment<format>(p.state.m, i);
  const __m256 old_v = load_moment<format>(p.state.v, i);
  const __m256 old = load_master<format>(p, i);
  const __m256 m = _mm256_fmadd_ps(c.beta1, old_m, _mm256_mul_ps(c.one_minus_beta1, g));
  const __m256 v = _mm256_fmadd_ps(_mm256_mul_ps(c.one_minus_beta2, g), g, _mm256_mul_ps(c.beta2, old_v));
  const __m256 denominator = _mm256_fmadd_ps(_mm256_sqrt_ps(v), c.inv_sqrt_correction2, c.eps);
  const __m256 decayed = _mm256_fmadd_ps(c.minus_decay, old, old);
  const __m256 master = _mm256_fmadd_ps(c.minus_step_size, _mm256_div_ps(m, denominator), decayed);
  store_moment<format>(p.state.m, i, m, _mm256_and_si256(random, _mm256_set1_epi32(0xffff)));
  store_moment<format>(p.state.v, i, v, _mm256_srli_epi32(random, 16));
  store_master<format>(p, i, master);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p.weight + i), weight_of_master(master));
}

/// Whole groups of eight elements. Returns how many elements that were.
template <StateFormat format>
std::int64_t adamw_groups(const AdamPiece& piece, const Coefficients& c) {
  std::int64_t i = 0;
  for (; i + 8 <= piece.count; i += 8) adamw_eight<format>(piece, i, c, _mm256_setzero_si256());
  return i;
}

/// `x` in every lane.
__m256i spread(std::uint64_t x) { return _mm256_set1_epi64x(static_cast<long long>(x)); }

/// Two words of the generator's state in each 64-bit lane, the even one below.
struct RandomState {
  __m256i words01, words23;
};

/// The new words: a product's halves in the other order, the old upper word, the key.
__m256i next_words(__m256i product, __m256i words, __m256i key) {
  const __m256i swapped = _mm256_shuffle_epi32(product, _MM_SHUFFLE(2, 3, 0, 1));
  return _mm256_xor_si256(swapped, _mm256_xor_si256(_mm256_srli_epi64(words, 32), key));
}

/// A round on four blocks.
RandomState philox_round(const RandomState& s, __m256i key0, __m256i key1) {
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

  /// Of the elements of eight blocks from `first` on: four vectors of 8.
  RandomBits draw(std::uint64_t first) const {
    // So dealt, blocks follow one another when 64-bit lanes are interleaved within 128 bits.
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

/// Whole runs from `i`, which begins one. Returns where the last ended.
std::int64_t adamw_runs(const AdamPiece& piece, std::int64_t i, const Coefficients& c,
                        const AdamCoefficients& scalars) {
  const MomentBits bits(scalars);
  for (; i + random_run <= piece.count; i += random_run) {
    const std::uint64_t first = (piece.index + static_cast<std::uint64_t>(i)) / numerics::elements_per_block;
    const RandomBits random = bits.draw(first);
    for (int v = 0; v < 4; ++v) adamw_eight<StateFormat::bf16_moments>(piece, i + 8 * v, c, random.of[v]);
  }
  return i;
}

}  // namespace

void adamw_avx2(const AdamPiece& piece, const AdamCoefficients& coefficients) {
  const Coefficients c(coefficients);
  const std::int64_t head = unaligned_head(piece);
  adamw_between(0, head, piece, coefficients);
  std::int64_t done = head;
  switch (piece.format) {
    case StateFormat::fp32:
      done = adamw_groups<StateFormat::fp32>(piece, c);
      break;
    case StateFormat::split:
      done = adamw_groups<StateFormat::split>(piece, c);
      break;
    case StateFormat::bf16_moments:
      done = adamw_runs(piece, head, c, coefficients);
      break;
  }
  adamw_between(done, piece.count, piece, coefficients);
}

double norm_block_avx2(const bf16* gradient, std::int64_t count) {
  __m256d lanes[8];
  for (__m256d& lane : lanes) lane = _mm256_setzero_pd();
  std::int64_t i = 0;
  for (; i + numerics::norm_lanes <= count; i += numerics::norm_lanes) {
    for (int j = 0; j < 4; ++j) {
      const __m256 g = widen(gradient + i + 8 * j);
      const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(g));
      const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(g, 1));
      lanes[2 * j] = _mm256_fmadd_pd(low, low, lanes[2 * j]);
      lanes[2 * j + 1] = _mm256_fmadd_pd(high, high, lanes[2 * j + 1]);
    }
  }
  double lane[numerics::norm_lanes];
  for (int j = 0; j < 8; ++j) _mm256_storeu_pd(lane + 4 * j, lanes[j]);
  return fold_norm_lanes(lane, gradient, i, count);
}

}  // namespace tandem::kernels

#ifdef __clang__
#pragma clang attribute pop
#endif
