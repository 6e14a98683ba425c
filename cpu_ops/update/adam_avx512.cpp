#include <immintrin.h>

#include "core/numerics/norm_block.hpp"
#include "cpu_ops/update/adam_kernels.hpp"

// From here on only: inline functions of the headers above stay compiled for any processor.
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")
// GCC 12 warns about the deliberately undefined operands inside its own intrinsics.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include "cpu_ops/update/avx512.hpp"
#include "cpu_ops/update/coded_avx512.hpp"
#include "cpu_ops/update/halves_avx512.hpp"

namespace tandem::kernels {
namespace {

/// numerics::sign_of, sixteen at once.
__m512 sign_of(__m512 x) {
  const __m512 one = _mm512_or_ps(_mm512_and_ps(x, _mm512_set1_ps(-0.0F)), _mm512_set1_ps(1.0F));
  const __m512 sign = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_NEQ_UQ), one);
  return _mm512_mask_mov_ps(sign, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), x);
}

struct LionSixteen {
  __m512 master, m;
};

/// numerics::lion, sixteen at once.
[[gnu::always_inline]] inline LionSixteen lion(const LionSixteen& old, __m512 gradient, const Coefficients& c) {
  const __m512 g = _mm512_mul_ps(gradient, c.gradient_scale);
  const __m512 direction = sign_of(_mm512_fmadd_ps(c.beta1, old.m, _mm512_mul_ps(c.one_minus_beta1, g)));
  const __m512 decayed = _mm512_fmadd_ps(c.minus_decay, old.master, old.master);
  return {_mm512_fmadd_ps(c.minus_lr, direction, decayed),
          _mm512_fmadd_ps(c.beta2, old.m, _mm512_mul_ps(c.one_minus_beta2, g))};
}

/// Elements ahead of the ones at work that are asked for: with seven streams the hardware alone falls behind.
constexpr std::int64_t ahead = 192;

void prefetch_elements(const void* array, std::int64_t i, std::int64_t count, std::size_t bytes) {
  const auto* begin = reinterpret_cast<const char*>(at(array, i, bytes));
  for (std::size_t line = 0; line < static_cast<std::size_t>(count) * bytes; line += 64) {
    _mm_prefetch(begin + line, _MM_HINT_T0);
  }
}

template <StateFormat format>
void prefetch(const AdamPiece& p, std::int64_t i, std::int64_t count) {
  prefetch_elements(p.state.master, i, count, master_bytes(format, 1));
  if constexpr (format == StateFormat::byte_moments) {  // a block's codes; of its exponent another block's fetch brings
    _mm_prefetch(reinterpret_cast<const char*>(coded_block_at(p.state.m, i).codes), _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(coded_block_at(p.state.v, i).codes), _MM_HINT_T0);
  } else {
    prefetch_elements(p.state.m, i, count, m_bytes(format, 1));
    prefetch_elements(p.state.v, i, count, v_bytes(format, 1));
  }
  prefetch_elements(p.gradient, i, count, 2);
  if constexpr (format != StateFormat::fp32) prefetch_elements(p.weight, i, count, 2);
}

// -- moments in fp32 -------------------------------------------------------------------------------------

template <StateFormat format>
__m512 load_master(const AdamPiece& p, std::int64_t i) {
  if constexpr (format == StateFormat::fp32) return _mm512_loadu_ps(at(p.state.master, i, 4));
  return join_master(load_bf16(p.weight, i), load_bf16(p.state.master, i));
}
template <StateFormat format>
void store_master(const AdamPiece& p, std::int64_t i, __m512 master) {
  if constexpr (format == StateFormat::fp32) {
    _mm512_storeu_ps(element<float>(p.state.master, i), master);
  } else {
    store_bf16(p.state.master, i, _mm512_cvtepi32_epi16(_mm512_castps_si512(master)));
  }
}

/// Returns the weights.
template <StateFormat format>
__m256i update_sixteen(const AdamPiece& p, std::int64_t i, __m256i gradient, const Coefficients& c) {
  const __m512 master = load_master<format>(p, i), m = _mm512_loadu_ps(at(p.state.m, i, 4));
  if constexpr (is_lion(format)) {
    const LionSixteen updated = lion({master, m}, widen(gradient), c);
    _mm512_storeu_ps(element<float>(p.state.m, i), updated.m);
    store_master<format>(p, i, updated.master);
    return weight_of_master(updated.master);
  } else {
    const Sixteen updated = adamw({master, m, _mm512_loadu_ps(at(p.state.v, i, 4))}, widen(gradient), c);
    _mm512_storeu_ps(element<float>(p.state.m, i), updated.m);
    _mm512_storeu_ps(element<float>(p.state.v, i), updated.v);
    store_master<format>(p, i, updated.master);
    return weight_of_master(updated.master);
  }
}

/// 32 elements, one cache line of gradient and of weight. `past_cache` writes weights around the cache (their old
/// values need not be read); needs aligned weights.
template <StateFormat format, bool past_cache>
void update_line(const AdamPiece& piece, std::int64_t i, const Coefficients& c) {
  const __m512i gradient = _mm512_loadu_si512(piece.gradient + i);
  const __m256i low = update_sixteen<format>(piece, i, _mm512_castsi512_si256(gradient), c);
  const __m256i high = update_sixteen<format>(piece, i + 16, _mm512_extracti64x4_epi64(gradient, 1), c);
  const __m512i weights = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
  if constexpr (past_cache) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(piece.weight + i), weights);
  } else {
    _mm512_storeu_si512(piece.weight + i, weights);
  }
}

/// Whole groups of 32 elements. Returns how many elements that were.
template <StateFormat format, bool past_cache>
std::int64_t update_lines(const AdamPiece& piece, const Coefficients& c) {
  std::int64_t i = 0;
  for (; i + 32 <= piece.count; i += 32) {
    prefetch<format>(piece, i + ahead, 32);
    update_line<format, past_cache>(piece, i, c);
  }
  if constexpr (past_cache) _mm_sfence();  // before anybody is told that the weights are there
  return i;
}

/// Whole groups of sixteen elements whose weights are their masters. Returns how many elements that were.
std::int64_t adamw_of_fp32_weights(const AdamPiece& p, const Coefficients& c) {
  std::int64_t i = 0;
  for (; i + 16 <= p.count; i += 16) {
    const Sixteen old{_mm512_loadu_ps(p.fp32_weight + i), _mm512_loadu_ps(at(p.state.m, i, 4)),
                      _mm512_loadu_ps(at(p.state.v, i, 4))};
    const Sixteen updated = adamw(old, _mm512_loadu_ps(p.fp32_gradient + i), c);
    _mm512_storeu_ps(element<float>(p.state.m, i), updated.m);
    _mm512_storeu_ps(element<float>(p.state.v, i), updated.v);
    _mm512_storeu_ps(p.fp32_weight + i, updated.master);
  }
  return i;
}

/// adamw_of_fp32_weights() by Lion.
std::int64_t lion_of_fp32_weights(const AdamPiece& p, const Coefficients& c) {
  std::int64_t i = 0;
  for (; i + 16 <= p.count; i += 16) {
    const LionSixteen old{_mm512_loadu_ps(p.fp32_weight + i), _mm512_loadu_ps(at(p.state.m, i, 4))};
    const LionSixteen updated = lion(old, _mm512_loadu_ps(p.fp32_gradient + i), c);
    _mm512_storeu_ps(element<float>(p.state.m, i), updated.m);
    _mm512_storeu_ps(p.fp32_weight + i, updated.master);
  }
  return i;
}

// -- moments in bf16 -------------------------------------------------------------------------------------

/// Whole runs from `i`, which begins one. Returns where the last ended.
std::int64_t adamw_runs(const AdamPiece& piece, std::int64_t i, const Coefficients& c,
                        const AdamCoefficients& scalars) {
  const MomentBits bits(scalars, first_random_block(piece));
  RunBits random(bits, piece.index + static_cast<std::uint64_t>(i));
  Unrecorded unrecorded;
  for (; i + random_run <= piece.count; i += random_run) {
    prefetch<StateFormat::bf16_moments>(piece, i + ahead, random_run);
    if (!adamw_run(piece, i, c, random, unrecorded)) adamw_between(i, i + random_run, piece, scalars);
  }
  return i;
}

// -- moments in a byte ------------------------------------------------------------------------------------

/// Whole blocks. Returns how many elements that were.
std::int64_t adamw_blocks(const AdamPiece& piece, const Coefficients& c, const AdamCoefficients& scalars) {
  const MomentBits bits(scalars, first_random_block(piece));
  Unrecorded unrecorded;
  std::int64_t i = 0;
  for (; i + coded_block <= piece.count; i += coded_block) {
    prefetch<StateFormat::byte_moments>(piece, i + 2 * ahead, coded_block);
    if (!adamw_coded(piece, i, c, bits, unrecorded)) adamw_between(i, i + coded_block, piece, scalars);
  }
  return i;
}

}  // namespace

void adamw_avx512(const AdamPiece& piece, const AdamCoefficients& coefficients) {
  const Coefficients c(coefficients);
  const std::int64_t head = unaligned_head(piece);
  adamw_between(0, head, piece, coefficients);
  std::int64_t done = head;
  switch (piece.format) {
    case StateFormat::fp32: {
      const bool aligned = reinterpret_cast<std::uintptr_t>(piece.weight) % 64 == 0;
      done =
          aligned ? update_lines<StateFormat::fp32, true>(piece, c) : update_lines<StateFormat::fp32, false>(piece, c);
      break;
    }
    case StateFormat::split:
      done = update_lines<StateFormat::split, false>(piece, c);
      break;
    case StateFormat::bf16_moments:
      done = adamw_runs(piece, head, c, coefficients);
      break;
    case StateFormat::byte_moments:
      done = adamw_blocks(piece, c, coefficients);
      break;
    case StateFormat::fp32_weights:
      done = adamw_of_fp32_weights(piece, c);
      break;
    case StateFormat::lion:
      done = update_lines<StateFormat::lion, false>(piece, c);
      break;
    case StateFormat::lion_fp32_weights:
      done = lion_of_fp32_weights(piece, c);
      break;
  }
  adamw_between(done, piece.count, piece, coefficients);
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

#ifdef __clang__
#pragma clang attribute pop
#endif
