#include <immintrin.h>

#include "core/numerics/norm_block.hpp"
#include "cpu_ops/adam_kernels.hpp"

// From here on only: inline functions of the headers above stay compiled for any processor.
#pragma GCC target("avx2,fma")

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

void adamw_eight(const AdamPiece& p, std::int64_t i, const Coefficients& c) {
  const __m256 g = _mm256_mul_ps(widen(p.gradient + i), c.gradient_scale);
  const __m256 m = _mm256_fmadd_ps(c.beta1, _mm256_loadu_ps(p.m + i), _mm256_mul_ps(c.one_minus_beta1, g));
  const __m256 v =
      _mm256_fmadd_ps(_mm256_mul_ps(c.one_minus_beta2, g), g, _mm256_mul_ps(c.beta2, _mm256_loadu_ps(p.v + i)));
  const __m256 denominator = _mm256_fmadd_ps(_mm256_sqrt_ps(v), c.inv_sqrt_correction2, c.eps);
  const __m256 old = _mm256_loadu_ps(p.master + i);
  const __m256 decayed = _mm256_fmadd_ps(c.minus_decay, old, old);
  const __m256 master = _mm256_fmadd_ps(c.minus_step_size, _mm256_div_ps(m, denominator), decayed);
  _mm256_storeu_ps(p.m + i, m);
  _mm256_storeu_ps(p.v + i, v);
  _mm256_storeu_ps(p.master + i, master);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p.weight + i), weight_of_master(master));
}

}  // namespace

void adamw_avx2(const AdamPiece& piece, const AdamCoefficients& coefficients) {
  const Coefficients c(coefficients);
  std::int64_t i = 0;
  for (; i + 8 <= piece.count; i += 8) adamw_eight(piece, i, c);
  adamw_from(i, piece, coefficients);
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
