#pragma once
// Elementary functions as fixed fp32 sequences: a compiler can vectorise them, and every processor
// that evaluates them gets the same bits, which the C library's do not promise.
#include "core/numerics/ieee.hpp"

namespace tandem::numerics {

constexpr float round_magic = 12582912.0F;  ///< 1.5 * 2^23: adding it rounds to an integer
constexpr std::uint32_t round_magic_bits = 0x4b400000U;

/// x = n ln2 + r with |r| <= ln2 / 2, for |x| <= 89.
struct ExpParts {
  float shifted;  ///< n + round_magic: its low bits are n
  float power;    ///< e^r
};

/// Range reduction with a two-part ln2 (Cody and Waite), polynomial of degree 6.
TANDEM_HD ExpParts exp_parts(float x) {
  constexpr float log2e = 1.44269504088896341F;
  constexpr float ln2_high = 0.693145751953125F;
  constexpr float ln2_low = 1.42860682030941723e-6F;
  const float shifted = fma(x, log2e, round_magic);
  const float n = shifted - round_magic;
  const float r = fma(-n, ln2_low, fma(-n, ln2_high, x));
  float p = 1.3888889225e-3F;
  p = fma(p, r, 8.3333337680e-3F);
  p = fma(p, r, 4.1666667908e-2F);
  p = fma(p, r, 1.6666667163e-1F);
  p = fma(p, r, 5.0000000000e-1F);
  p = fma(p, r, 1.0F);
  p = fma(p, r, 1.0F);
  return {shifted, p};
}

/// e^x with relative error below 2e-7 on [-87.3, 88.7]; 0 below, +inf above, NaN for NaN.
TANDEM_HD float exp(float x) {
  const float clamped = x < -88.0F ? -88.0F : (x > 88.72283F ? 88.72283F : x);
  const ExpParts parts = exp_parts(clamped);
  // n, by its bits: a conversion would not be defined of NaN, of which this makes any number.
  const std::int32_t exponent = static_cast<std::int32_t>(float_bits(parts.shifted) - round_magic_bits);
  // 2^n in two halves, so that n = 128 and n = -127 stay in range of the exponent field.
  const std::int32_t half = exponent >> 1;
  const float scale_a = bits_float(static_cast<std::uint32_t>(half + 127) << 23);
  const float scale_b = bits_float(static_cast<std::uint32_t>(exponent - half + 127) << 23);
  const float result = mul(mul(parts.power, scale_a), scale_b);
  const float low_checked = x < -87.33654F ? 0.0F : result;
  const float high_checked = x > 88.72283F ? bits_float(0x7f800000u) : low_checked;
  return x == x ? high_checked : x;
}

/// s = 1 / (1 + e^-x), and 1 - s without the difference that cancels.
struct Logistic {
  float value;
  float complement;
};

/// For |x| <= 80, each with relative error below 4e-7. Of larger numbers and of NaN it makes anything: who asks holds x
/// within, and multiplies by what is NaN.
TANDEM_HD Logistic logistic_within_80(float x) {
  const ExpParts parts = exp_parts(-x);
  // 2^n goes straight into the exponent.
  const float e = bits_float(float_bits(parts.power) + (float_bits(parts.shifted) << 23));
  const float value = reciprocal(1.0F + e);
  return {value, mul(e, value)};
}

}  // namespace tandem::numerics
