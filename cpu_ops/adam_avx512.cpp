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

const std::byte* at(const void* array, std::int64_t i, std::size_t bytes) {
  return static_cast<const std::byte*>(array) + static_cast<std::size_t>(i) * bytes;
}
template <class T>
T* element(void* array, std::int64_t i) {
  return static_cast<T*>(array) + i;
}

/// numerics::join_master, sixteen at once.
__m512 join_master(__m256i weight, __m256i residual) {
  const __m512i low = _mm512_cvtepu16_epi32(residual);
  const __m512i high = _mm512_sub_epi32(_mm512_cvtepu16_epi32(weight), _mm512_srli_epi32(low, 15));
  return _mm512_castsi512_ps(_mm512_or_si512(_mm512_slli_epi32(high, 16), low));
}

/// numerics::round_stochastically, sixteen at once; `bits` below 2^16.
__m256i round_stochastically(__m512 x, __m512i bits) {
  const __m512i all = _mm512_castps_si512(x);
  const __m512i exponent = _mm512_set1_epi32(0x7f800000);
  const __mmask16 finite = _mm512_cmpneq_epi32_mask(_mm512_and_si512(all, exponent), exponent);
  const __m512i rounded = _mm512_srli_epi32(_mm512_mask_add_epi32(all, finite, all, bits), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_or_epi32(rounded, nan, rounded, _mm512_set1_epi32(0x40)));
}

__m256i load_bf16(const void* array, std::int64_t i) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at(array, i, 2)));
}
void store_bf16(void* array, std::int64_t i, __m256i bits) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(element<bf16>(array, i)), bits);
}

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
template <StateFormat format>
__m512 load_moment(const void* array, std::int64_t i) {
  if constexpr (format == StateFormat::bf16_moments) return widen(load_bf16(array, i));
  return _mm512_loadu_ps(at(array, i, 4));
}
template <StateFormat format>
void store_moment(void* array, std::int64_t i, __m512 moment, __m512i random) {
  if constexpr (format == StateFormat::bf16_moments) {
    store_bf16(array, i, round_stochastically(moment, random));
  } else {
    _mm512_storeu_ps(element<float>(array, i), moment);
  }
}

/// Returns the weights. `random`: numerics::moment_bits of the elements, where the format wants them.
template <StateFormat format>
__m256i adamw_sixteen(const AdamPiece& p, std::int64_t i, __m256i gradient, const Coefficients& c, __m512i random) {
  const __m512 g = _mm512_mul_ps(widen(gradient), c.gradient_scale);
  const __m512 old_m = load_moment<format>(p.state.m, i);
  const __m512 old_v = load_moment<format>(p.state.v, i);
  const __m512 old = load_master<format>(p, i);
  const __m512 m = _mm512_fmadd_ps(c.beta1, old_m, _mm512_mul_ps(c.one_minus_beta1, g));
  const __m512 v = _mm512_fmadd_ps(_mm512_mul_ps(c.one_minus_beta2, g), g, _mm512_mul_ps(c.beta2, old_v));
  const __m512 denominator = _mm512_fmadd_ps(_mm512_sqrt_ps(v), c.inv_sqrt_correction2, c.eps);
  const __m512 decayed = _mm512_fmadd_ps(c.minus_decay, old, old);
  const __m512 master = _mm512_fmadd_ps(c.minus_step_size, _mm512_div_ps(m, denominator), decayed);
  store_moment<format>(p.state.m, i, m, _mm512_and_si512(random, _mm512_set1_epi32(0xffff)));
  store_moment<format>(p.state.v, i, v, _mm512_srli_epi32(random, 16));
  store_master<format>(p, i, master);
  return weight_of_master(master);
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
  prefetch_elements(p.state.master, i, count, master_bytes(format));
  prefetch_elements(p.state.m, i, count, moment_bytes(format));
  prefetch_elements(p.state.v, i, count, moment_bytes(format));
  prefetch_elements(p.gradient, i, count, 2);
  if constexpr (format != StateFormat::fp32) prefetch_elements(p.weight, i, count, 2);
}

/// 32 elements, one cache line of gradient and of weight. `past_cache` writes weights around the cache (their old
/// values need not be read); needs aligned weights.
template <StateFormat format, bool past_cache>
void adamw_line(const AdamPiece& piece, std::int64_t i, const Coefficients& c, __m512i random_low,
                __m512i random_high) {
  const __m512i gradient = _mm512_loadu_si512(piece.gradient + i);
  const __m256i low = adamw_sixteen<format>(piece, i, _mm512_castsi512_si256(gradient), c, random_low);
  const __m256i high = adamw_sixteen<format>(piece, i + 16, _mm512_extracti64x4_epi64(gradient, 1), c, random_high);
  const __m512i weights = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
  if constexpr (past_cache) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(piece.weight + i), weights);
  } else {
    _mm512_storeu_si512(piece.weight + i, weights);
  }
}

/// Whole groups of 32 elements. Returns how many elements that were.
template <StateFormat format, bool past_cache>
std::int64_t adamw_lines(const AdamPiece& piece, const Coefficients& c) {
  const __m512i no_random = _mm512_setzero_si512();
  std::int64_t i = 0;
  for (; i + 32 <= piece.count; i += 32) {
    prefetch<format>(piece, i + ahead, 32);
    adamw_line<format, past_cache>(piece, i, c, no_random, no_random);
  }
  if constexpr (past_cache) _mm_sfence();  // before anybody is told that the weights are there
  return i;
}

/// The low word of `x` in every lane.
__m512i spread(std::uint64_t x) { return _mm512_set1_epi32(static_cast<int>(static_cast<std::uint32_t>(x))); }

/// High and low halves of sixteen 32-bit products.
struct Products {
  __m512i high, low;
};
Products multiply(__m512i a, __m512i b) {
  const __m512i even = _mm512_mul_epu32(a, b);
  const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), b);
  constexpr __mmask16 odd_lanes = 0xaaaa;
  return {_mm512_mask_mov_epi32(_mm512_srli_epi64(even, 32), odd_lanes, odd),
          _mm512_mask_mov_epi32(even, odd_lanes, _mm512_slli_epi64(odd, 32))};
}

/// numerics::moment_bits of 64 elements: four vectors of 16.
struct RandomBits {
  __m512i of[4];
};

/// Philox of sixteen blocks at once, `first` the first of them. The lanes are dealt so that what four blocks in a row
/// give ends up side by side when words are interleaved within 128 bits.
RandomBits random_bits(std::uint64_t seed, std::uint64_t step, std::uint64_t first) {
  const __m512i lanes = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  // `first` is a multiple of sixteen: no lane carries into the upper word.
  __m512i c[4] = {_mm512_add_epi32(spread(first), lanes), spread(first >> 32), spread(step), spread(step >> 32)};
  const __m512i multiplier0 = spread(numerics::philox_multiplier0), multiplier1 = spread(numerics::philox_multiplier1);
  __m512i key0 = spread(seed), key1 = spread(seed >> 32);
  for (int round = 0; round < numerics::philox_rounds; ++round) {
    const Products p0 = multiply(c[0], multiplier0), p1 = multiply(c[2], multiplier1);
    const __m512i next0 = _mm512_ternarylogic_epi32(p1.high, c[1], key0, 0x96);
    const __m512i next2 = _mm512_ternarylogic_epi32(p0.high, c[3], key1, 0x96);
    c[0] = next0;
    c[1] = p1.low;
    c[2] = next2;
    c[3] = p0.low;
    key0 = _mm512_add_epi32(key0, spread(numerics::philox_weyl0));
    key1 = _mm512_add_epi32(key1, spread(numerics::philox_weyl1));
  }
  const __m512i low01 = _mm512_unpacklo_epi32(c[0], c[1]), high01 = _mm512_unpackhi_epi32(c[0], c[1]);
  const __m512i low23 = _mm512_unpacklo_epi32(c[2], c[3]), high23 = _mm512_unpackhi_epi32(c[2], c[3]);
  return {{_mm512_unpacklo_epi64(low01, low23), _mm512_unpackhi_epi64(low01, low23),
           _mm512_unpacklo_epi64(high01, high23), _mm512_unpackhi_epi64(high01, high23)}};
}

/// Whole runs from `i`, which begins one. Returns where the last ended.
std::int64_t adamw_runs(const AdamPiece& piece, std::int64_t i, const Coefficients& c,
                        const AdamCoefficients& scalars) {
  constexpr auto format = StateFormat::bf16_moments;
  for (; i + random_run <= piece.count; i += random_run) {
    prefetch<format>(piece, i + ahead, random_run);
    const std::uint64_t first = (piece.index + static_cast<std::uint64_t>(i)) / numerics::elements_per_block;
    const RandomBits random = random_bits(scalars.seed, scalars.step, first);
    adamw_line<format, false>(piece, i, c, random.of[0], random.of[1]);
    adamw_line<format, false>(piece, i + 32, c, random.of[2], random.of[3]);
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
      done = aligned ? adamw_lines<StateFormat::fp32, true>(piece, c) : adamw_lines<StateFormat::fp32, false>(piece, c);
      break;
    }
    case StateFormat::split:
      done = adamw_lines<StateFormat::split, false>(piece, c);
      break;
    case StateFormat::bf16_moments:
      done = adamw_runs(piece, head, c, coefficients);
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
