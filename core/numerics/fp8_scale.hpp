#pragma once
// Scales of matrices in eight-bit floating point: one power of two for all elements, which the largest magnitude among
// them decides. Since magnitudes are compared as integers, that is the same in whatever order they are seen.
#include <cstdint>

#include "core/numerics/fp8.hpp"

namespace tandem::numerics {

/// Magnitude of an element as an integer, in the order of magnitudes: the bits of fp32 without the sign. Those from
/// fp8_not_finite on are not finite.
TANDEM_HD std::uint32_t fp8_magnitude(float x) { return float_bits(x) & 0x7fffffffu; }
TANDEM_HD std::uint32_t fp8_magnitude(bf16 x) { return static_cast<std::uint32_t>(x.bits & 0x7fffu) << 16; }
constexpr std::uint32_t fp8_not_finite = 0x7f800000u;

/// Exponent of a scale is at least this: then each code times its scale is a normal number of bf16.
constexpr int fp8_least_exponent = -100;

/// Exponent e of the scale 2^e of a matrix with that largest magnitude, which is finite: the least for which no element
/// is beyond the largest number of the format, 1.75 times a power of two. At most as large as keeps that number times
/// the scale finite: elements beyond, the largest that there are, become that.
template <class Format>
TANDEM_HD int fp8_exponent(std::uint32_t largest) {
  constexpr int largest_power = Format::largest_exponent;
  constexpr std::uint32_t fraction = 0x7fffffu, three_quarters = 0x600000u;
  const int power = static_cast<int>(largest >> 23) - 127;
  const int e = power - largest_power + ((largest & fraction) > three_quarters ? 1 : 0);
  if (e < fp8_least_exponent) return fp8_least_exponent;
  return e > 127 - largest_power ? 127 - largest_power : e;
}

/// 2^e, for exponents of scales and their negatives.
TANDEM_HD float fp8_power(int e) { return bits_float(static_cast<std::uint32_t>(127 + e) << 23); }
/// Exponent of a scale, from the power of two that it is.
TANDEM_HD int fp8_exponent_of(float scale) { return static_cast<int>(fp8_magnitude(scale) >> 23) - 127; }

/// Code of an element under the scale 2^e.
template <class Format>
TANDEM_HD std::uint8_t to_scaled_fp8(float x, int e) {
  return to_fp8<Format>(mul(x, fp8_power(-e)));
}
/// The number that a code stands for under the scale 2^e, exactly.
template <class Format>
TANDEM_HD bf16 scaled_fp8_to_bf16(std::uint32_t code, int e) {
  return bf16{static_cast<std::uint16_t>(float_bits(mul(fp8_to_float<Format>(code), fp8_power(e))) >> 16)};
}

/// Code of each element of a matrix with a largest magnitude that is not finite.
template <class Format>
TANDEM_HD std::uint8_t fp8_nan_code() {
  return static_cast<std::uint8_t>(Format::nan);
}

}  // namespace tandem::numerics
