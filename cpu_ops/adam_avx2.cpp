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

/// The low word of `x` in every lane.
__m256i spread(std::uint64_t x) { return _mm256_set1_epi32(static_cast<int>(static_cast<std::uint32_t>(x))); }

/// High and low halves of eight 32-bit products.
struct Products {
  __m256i high, low;
};
Products multiply(__m256i a, __m256i b) {
  const __m256i even = _mm256_mul_epu32(a, b);
  const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), b);
  constexpr int odd_lanes = 0xaa;
  return {_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, odd_lanes),
          _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), odd_lanes)};
}

/// numerics::moment_bits of 32 elements: four vectors of 8.
struct RandomBits {
  __m256i of[4];
};

/// Philox of eight blocks at once, `first` the first of them. The lanes are dealt so that what four blocks in a row
/// give ends up side by side when words are interleaved within 128 bits.
RandomBits random_bits(std::uint64_t seed, std::uint64_t step, std::uint64_t first) {
  const __m256i lanes = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
  // `first` is a multiple of eight: no lane carries into the upper word.
  __m256i c[4] = {_mm256_add_epi32(spread(first), lanes), spread(first >> 32), spread(step), spread(step >> 32)};
  const __m256i multiplier0 = spread(numerics::philox_multiplier0), multiplier1 = spread(numerics::philox_multiplier1);
  __m256i key0 = spread(seed), key1 = spread(seed >> 32);
  for (int round = 0; round < numerics::philox_rounds; ++round) {
    const Products p0 = multiply(c[0], multiplier0), p1 = multiply(c[2], multiplier1);
    const __m256i next0 = _mm256_xor_si256(_mm256_xor_si256(p1.high, c[1]), key0);
    const __m256i next2 = _mm256_xor_si256(_mm256_xor_si256(p0.high, c[3]), key1);
    c[0] = next0;
    c[1] = p1.low;
    c[2] = next2;
    c[3] = p0.low;
    key0 = _mm256_add_epi32(key0, spread(numerics::philox_weyl0));
    key1 = _mm256_add_epi32(key1, spread(numerics::philox_weyl1));
  }
  const __m256i low01 = _mm256_unpacklo_epi32(c[0], c[1]), high01 = _mm256_unpackhi_epi32(c[0], c[1]);
  const __m256i low23 = _mm256_unpacklo_epi32(c[2], c[3]), high23 = _mm256_unpackhi_epi32(c[2], c[3]);
  return {{_mm256_unpacklo_epi64(low01, low23), _mm256_unpackhi_epi64(low01, low23),
           _mm256_unpacklo_epi64(high01, high23), _mm256_unpackhi_epi64(high01, high23)}};
}

/// Whole runs from `i`, which begins one. Returns where the last ended.
std::int64_t adamw_runs(const AdamPiece& piece, std::int64_t i, const Coefficients& c,
                        const AdamCoefficients& scalars) {
  for (; i + random_run <= piece.count; i += random_run) {
    for (std::int64_t at = i; at < i + random_run; at += 32) {
      const std::uint64_t first = (piece.index + static_cast<std::uint64_t>(at)) / numerics::elements_per_block;
      const RandomBits random = random_bits(scalars.seed, scalars.step, first);
      for (int v = 0; v < 4; ++v) adamw_eight<StateFormat::bf16_moments>(piece, at + 8 * v, c, random.of[v]);
    }
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
