#pragma once
// Elementary functions as fixed fp32 sequences: a compiler can vectorise them, and every processor
// that evaluates them gets the same bits, which the C library's do not promise.
#include "core/numerics/ieee.hpp"

namespace tandem::numerics {

/// e^x with relative error below 2e-7 on [-87.3, 88.7]; 0 below, +inf above, NaN for NaN.
/// Range reduction x = n ln2 + r with a two-part ln2 (Cody and Waite), degree-6 polynomial on
/// |r| <= ln2 / 2, then scaling by 2^n through the exponent bits.
TANDEM_HD float exp(float x) {
  constexpr float log2e = 1.44269504088896341F;
  constexpr float ln2_high = 0.693145751953125F;
  constexpr float ln2_low = 1.42860682030941723e-6F;
  constexpr float round_magic = 12582912.0F;  // 1.5 * 2^23: adding it rounds to an integer
  const float clamped = x < -88.0F ? -88.0F : (x > 88.72283F ? 88.72283F : x);
  const float shifted = fma(clamped, log2e, round_magic);
  const float n = shifted - round_magic;
  const float r = fma(-n, ln2_low, fma(-n, ln2_high, clamped));
  float p = 1.3888889225e-3F;
  p = fma(p, r, 8.3333337680e-3F);
  p = fma(p, r, 4.1666667908e-2F);
  p = fma(p, r, 1.6666667163e-1F);
  p = fma(p, r, 5.0000000000e-1F);
  p = fma(p, r, 1.0F);
  p = fma(p, r, 1.0F);
  // 2^n in two halves, so that n = 128 and n = -127 stay in range of the exponent field.
  const std::int32_t exponent = static_cast<std::int32_t>(n);
  const std::int32_t half = exponent >> 1;
  const float scale_a = bits_float(static_cast<std::uint32_t>(half + 127) << 23);
  const float scale_b = bits_float(static_cast<std::uint32_t>(exponent - half + 127) << 23);
  const float result = mul(mul(p, scale_a), scale_b);
  const float low_checked = x < -87.33654F ? 0.0F : result;
  const float high_checked = x > 88.72283F ? bits_float(0x7f800000u) : low_checked;
  return x == x ? high_checked : x;
}

/// tanh through exp(-2|x|): no cancellation for |x| > 0.3; an odd polynomial below.
TANDEM_HD float tanh(float x) {
  const float a = x < 0.0F ? -x : x;
  const float e = exp(-2.0F * a);
  const float large = div(1.0F - e, 1.0F + e);
  const float s = x * x;
  // Taylor to x^11; at |x| <= 0.3 the next term is below 4e-10 relative.
  float p = fma(s, -8.8632355299e-3F, 2.1869488536e-2F);
  p = fma(p, s, -5.3968253968e-2F);
  p = fma(p, s, 1.3333333333e-1F);
  p = fma(p, s, -3.3333333333e-1F);
  const float small = fma(mul(p, s), a, a);
  const float magnitude = a < 0.3F ? small : large;
  return x < 0.0F ? -magnitude : magnitude;
}

TANDEM_HD float sigmoid(float x) { return div(1.0F, 1.0F + exp(-x)); }

}  // namespace tandem::numerics
