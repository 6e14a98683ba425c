#include <immintrin.h>

#include "core/numerics/norm_block.hpp"
#include "cpu_ops/update/adam_kernels.hpp"

// From here on only: inline functions of the headers above stay compiled for any processor.
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif

#include "cpu_ops/update/avx2.hpp"

namespace tandem::kernels {
namespace {

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

struct Moments {
  __m256 m, v;
};

/// numerics::adamw, eight at once, but for storing the new moments, which it returns.
template <StateFormat format>
Moments adamw_eight(const AdamPiece& p, std::int64_t i, const Coefficients& c, Moments moments) {
  const Step step = step_of(moments.m, moments.v, load_gradient<format>(p, i), c);
  store_master<format>(p, i, moved(load_master<format>(p, i), step.direction, c));
  return {step.m, step.v};
}

/// `random`: numerics::moment_bits of the elements, where the format wants them.
template <StateFormat format>
void adamw_eight(const AdamPiece& p, std::int64_t i, const Coefficients& c, __m256i random) {
  const Moments old{load_moment<format>(p.state.m, i), load_moment<format>(p.state.v, i)};
  const Moments updated = adamw_eight<format>(p, i, c, old);
  store_moment<format>(p.state.m, i, updated.m, _mm256_and_si256(random, _mm256_set1_epi32(0xffff)));
  store_moment<format>(p.state.v, i, updated.v, _mm256_srli_epi32(random, 16));
}

/// Whole groups of eight elements. Returns how many elements that were.
template <StateFormat format>
std::int64_t adamw_groups(const AdamPiece& piece, const Coefficients& c) {
  std::int64_t i = 0;
  for (; i + 8 <= piece.count; i += 8) adamw_eight<format>(piece, i, c, _mm256_setzero_si256());
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

// -- moments in a byte, eight at once ----------------------------------------------------------------------

/// 64 elements from `i` on: numerics::adamw_block.
void adamw_coded(const AdamPiece& p, std::int64_t i, const Coefficients& c, const MomentBits& bits) {
  constexpr int vectors = coded_block / 8;
  const CodedBlock of_m = coded_block_at(p.state.m, i), of_v = coded_block_at(p.state.v, i);
  const __m256 m_scale = power(*of_m.exponent);
  const __m256i v_base = all(numerics::v_base(*of_v.exponent));
  Moments moments[vectors];
  __m256i largest_m = _mm256_setzero_si256(), largest_v = _mm256_setzero_si256();
  for (int j = 0; j < vectors; ++j) {
    const Moments old{decode_m(load_codes(of_m.codes + 8 * j), m_scale),
                      decode_v(load_codes(of_v.codes + 8 * j), v_base)};
    moments[j] = adamw_eight<StateFormat::byte_moments>(p, i + 8 * j, c, old);
    largest_m = _mm256_max_epu32(largest_m, magnitude_of(moments[j].m));
    largest_v = _mm256_max_epu32(largest_v, magnitude_of(moments[j].v));
  }
  const std::uint32_t m_exponent = numerics::m_exponent(largest_of(largest_m));
  const std::uint32_t v_exponent = numerics::v_exponent(largest_of(largest_v));
  const __m256 new_scale = power(254 - m_exponent);
  const __m256i new_base = all(numerics::v_base(v_exponent));
  // A word serves two elements: those of a vector, sixteen.
  const RandomBits random = bits.draw((p.index + static_cast<std::uint64_t>(i)) / numerics::coded_elements_per_block);
  for (int half = 0; half < vectors / 4; ++half) {
    __m256i m[4], v[4];
    for (int j = 0; j < 4; ++j) {
      const __m256i words = random.of[2 * half + j / 2];
      const __m256i swapped = exchanged(words);
      const Moments& moment = moments[4 * half + j];
      m[j] = encode_m(moment.m, new_scale, increment(halves(words, j % 2)));
      v[j] = encode_v(moment.v, new_base, increment(halves(swapped, j % 2)));
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(of_m.codes + half * 32), narrow(m));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(of_v.codes + half * 32), narrow(v));
  }
  store_exponent(of_m, m_exponent, numerics::m_code_of_nan);
  store_exponent(of_v, v_exponent, numerics::v_code_of_nan);
}

/// Whole blocks. Returns how many elements that were.
std::int64_t adamw_blocks(const AdamPiece& piece, const Coefficients& c, const AdamCoefficients& scalars) {
  const MomentBits bits(scalars);
  std::int64_t i = 0;
  for (; i + coded_block <= piece.count; i += coded_block) adamw_coded(piece, i, c, bits);
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
