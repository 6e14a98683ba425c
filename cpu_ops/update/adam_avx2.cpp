#include <immintrin.h>

#include "core/numerics/norm_block.hpp"
#include "cpu_ops/update/adam_kernels.hpp"

// From here on only: inline functions of the headers above stay compiled for any processor.
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif

#include "cpu_ops/update/coded_avx2.hpp"
#include "cpu_ops/update/halves_avx2.hpp"

namespace tandem::kernels {
namespace {

template <StateFormat format>
__m256 load_master(const AdamPiece& p, std::int64_t i) {
  if constexpr (format == StateFormat::fp32) return _mm256_loadu_ps(element<float>(p.state.master, i));
  if constexpr (has_fp32_weights(format)) return _mm256_loadu_ps(p.fp32_weight + i);
  return join_master(p.weight + i, element<std::uint16_t>(p.state.master, i));
}
template <StateFormat format>
void store_master(const AdamPiece& p, std::int64_t i, __m256 master) {
  if constexpr (has_fp32_weights(format)) {
    _mm256_storeu_ps(p.fp32_weight + i, master);
  } else {
    if constexpr (format == StateFormat::fp32) {
      _mm256_storeu_ps(element<float>(p.state.master, i), master);
    } else {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(element<std::uint16_t>(p.state.master, i)),
                       low_halves(_mm256_castps_si256(master)));
    }
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p.weight + i), weight_of_master(master));
  }
}
template <StateFormat format>
__m256 load_gradient(const AdamPiece& p, std::int64_t i) {
  if constexpr (has_fp32_weights(format)) return _mm256_loadu_ps(p.fp32_gradient + i);
  return widen(p.gradient + i);
}
/// Whole groups of eight elements. Returns how many elements that were.
template <StateFormat format>
std::int64_t adamw_groups(const AdamPiece& p, const Coefficients& c) {
  std::int64_t i = 0;
  for (; i + 8 <= p.count; i += 8) {
    const Step step = step_of(_mm256_loadu_ps(element<float>(p.state.m, i)),
                              _mm256_loadu_ps(element<float>(p.state.v, i)), load_gradient<format>(p, i), c);
    store_master<format>(p, i, moved(load_master<format>(p, i), step.direction, c));
    _mm256_storeu_ps(element<float>(p.state.m, i), step.m);
    _mm256_storeu_ps(element<float>(p.state.v, i), step.v);
  }
  return i;
}

/// numerics::sign_of, eight at once.
__m256 sign_of(__m256 x) {
  const __m256 zero = _mm256_setzero_ps();
  const __m256 one = _mm256_or_ps(_mm256_and_ps(x, _mm256_set1_ps(-0.0F)), _mm256_set1_ps(1.0F));
  const __m256 sign = _mm256_and_ps(_mm256_cmp_ps(x, zero, _CMP_NEQ_UQ), one);
  return _mm256_blendv_ps(sign, x, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}

/// numerics::lion on whole groups of eight elements. Returns how many elements that were.
template <StateFormat format>
std::int64_t lion_groups(const AdamPiece& p, const Coefficients& c) {
  std::int64_t i = 0;
  for (; i + 8 <= p.count; i += 8) {
    const __m256 g = _mm256_mul_ps(load_gradient<format>(p, i), c.gradient_scale);
    const __m256 old = load_master<format>(p, i), m = _mm256_loadu_ps(element<float>(p.state.m, i));
    const __m256 direction = sign_of(_mm256_fmadd_ps(c.beta1, m, _mm256_mul_ps(c.one_minus_beta1, g)));
    const __m256 decayed = _mm256_fmadd_ps(c.minus_decay, old, old);
    store_master<format>(p, i, _mm256_fmadd_ps(c.minus_lr, direction, decayed));
    const __m256 next = _mm256_fmadd_ps(c.beta2, m, _mm256_mul_ps(c.one_minus_beta2, g));
    _mm256_storeu_ps(element<float>(p.state.m, i), next);
  }
  return i;
}

// -- moments in bf16

/// Whole runs from `i`, which begins one. Returns where the last ended.
std::int64_t adamw_runs(const AdamPiece& piece, std::int64_t i, const Coefficients& c,
                        const AdamCoefficients& scalars) {
  const MomentBits bits(scalars, first_random_block(piece));
  RunBits random(bits, piece.index + static_cast<std::uint64_t>(i));
  Unrecorded unrecorded;
  for (; i + random_run <= piece.count; i += random_run) {
    if (!adamw_run(piece, i, c, random, unrecorded)) adamw_between(i, i + random_run, piece, scalars);
  }
  return i;
}

// -- moments in a byte

/// Whole blocks. Returns how many elements that were.
std::int64_t adamw_blocks(const AdamPiece& piece, const Coefficients& c, const AdamCoefficients& scalars) {
  const MomentBits bits(scalars, first_random_block(piece));
  Unrecorded unrecorded;
  std::int64_t i = 0;
  for (; i + coded_block <= piece.count; i += coded_block) {
    if (!adamw_coded(piece, i, c, bits, unrecorded)) adamw_between(i, i + coded_block, piece, scalars);
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
    case StateFormat::byte_moments:
      done = adamw_blocks(piece, c, coefficients);
      break;
    case StateFormat::fp32_weights:
      done = adamw_groups<StateFormat::fp32_weights>(piece, c);
      break;
    case StateFormat::lion:
      done = lion_groups<StateFormat::lion>(piece, c);
      break;
    case StateFormat::lion_fp32_weights:
      done = lion_groups<StateFormat::lion_fp32_weights>(piece, c);
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
