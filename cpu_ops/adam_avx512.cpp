#include <immintrin.h>

#include "core/numerics/norm_block.hpp"
#include "cpu_ops/adam_kernels.hpp"

// GCC 12 warns about the deliberately undefined operands inside its own intrinsics.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
// From here on only: inline functions of the headers above stay compiled for any processor.
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")

namespace tandem::kernels {
namespace {

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
        minus_decay(_mm512_set1_ps(c.minus_decay)) {}
  __m512 gradient_scale, beta1, one_minus_beta1, beta2, one_minus_beta2, inv_sqrt_correction2, eps, minus_step_size,
      minus_decay;
};

__m512 widen(__m256i bits) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16)); }

/// numerics::weight_of_master, sixteen at once.
__m256i weight_of_master(__m512 master) {
  const __m512i bits = _mm512_castps_si512(master);
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x8000)), 16);
  const __m512i quiet = _mm512_or_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
  const __mmask16 nan = _mm512_cmp_ps_mask(master, master, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_blend_epi32(nan, rounded, quiet));
}

__m256i adamw_sixteen(const AdamPiece& p, std::int64_t i, __m256i gradient, const Coefficients& c) {
  const __m512 g = _mm512_mul_ps(widen(gradient), c.gradient_scale);
  const __m512 m = _mm512_fmadd_ps(c.beta1, _mm512_loadu_ps(p.m + i), _mm512_mul_ps(c.one_minus_beta1, g));
  const __m512 v =
      _mm512_fmadd_ps(_mm512_mul_ps(c.one_minus_beta2, g), g, _mm512_mul_ps(c.beta2, _mm512_loadu_ps(p.v + i)));
  const __m512 denominator = _mm512_fmadd_ps(_mm512_sqrt_ps(v), c.inv_sqrt_correction2, c.eps);
  const __m512 old = _mm512_loadu_ps(p.master + i);
  const __m512 decayed = _mm512_fmadd_ps(c.minus_decay, old, old);
  const __m512 master = _mm512_fmadd_ps(c.minus_step_size, _mm512_div_ps(m, denominator), decayed);
  _mm512_storeu_ps(p.m + i, m);
  _mm512_storeu_ps(p.v + i, v);
  _mm512_storeu_ps(p.master + i, master);
  return weight_of_master(master);
}

/// Elements ahead of the ones at work that are asked for: with seven streams the hardware alone falls behind.
constexpr std::int64_t ahead = 192;

void prefetch_line(const void* at) { _mm_prefetch(static_cast<const char*>(at), _MM_HINT_T0); }

void prefetch_thirty_two(const AdamPiece& p, std::int64_t i) {
  for (std::int64_t line = i; line < i + 32; line += 16) {
    prefetch_line(p.master + line);
    prefetch_line(p.m + line);
    prefetch_line(p.v + line);
  }
  prefetch_line(p.gradient + i);
}

/// Whole groups of 32 elements: one cache line of gradient and of weight. Returns how many elements that were.
/// `past_cache` writes weights around the cache (their old values need not be read); needs aligned weights.
template <bool past_cache>
std::int64_t adamw_groups(const AdamPiece& piece, const Coefficients& c) {
  std::int64_t i = 0;
  for (; i + 32 <= piece.count; i += 32) {
    prefetch_thirty_two(piece, i + ahead);
    const __m512i gradient = _mm512_loadu_si512(piece.gradient + i);
    const __m256i low = adamw_sixteen(piece, i, _mm512_castsi512_si256(gradient), c);
    const __m256i high = adamw_sixteen(piece, i + 16, _mm512_extracti64x4_epi64(gradient, 1), c);
    const __m512i weights = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    if constexpr (past_cache) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(piece.weight + i), weights);
    } else {
      _mm512_storeu_si512(piece.weight + i, weights);
    }
  }
  if constexpr (past_cache) _mm_sfence();  // before anybody is told that the weights are there
  return i;
}

}  // namespace

void adamw_avx512(const AdamPiece& piece, const AdamCoefficients& coefficients) {
  const Coefficients c(coefficients);
  const bool aligned = reinterpret_cast<std::uintptr_t>(piece.weight) % 64 == 0;
  adamw_from(aligned ? adamw_groups<true>(piece, c) : adamw_groups<false>(piece, c), piece, coefficients);
}

double norm_block_avx512(const bf16* gradient, std::int64_t count) {
  __m512d lanes[4];
  for (__m512d& lane : lanes) lane = _mm512_setzero_pd();
  std::int64_t i = 0;
  for (; i + numerics::norm_lanes <= count; i += numerics::norm_lanes) {
    const __m512i bits = _mm512_loadu_si512(gradient + i);
    const __m512 halves[2] = {widen(_mm512_castsi512_si256(bits)), widen(_mm512_extracti64x4_epi64(bits, 1))};
    for (int j = 0; j < 2; ++j) {
      const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(halves[j]));
      const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(halves[j], 1));
      lanes[2 * j] = _mm512_fmadd_pd(low, low, lanes[2 * j]);
      lanes[2 * j + 1] = _mm512_fmadd_pd(high, high, lanes[2 * j + 1]);
    }
  }
  double lane[numerics::norm_lanes];
  for (int j = 0; j < 4; ++j) _mm512_storeu_pd(lane + 8 * j, lanes[j]);
  return fold_norm_lanes(lane, gradient, i, count);
}

}  // namespace tandem::kernels
