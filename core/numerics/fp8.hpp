#pragma once
// Eight-bit floating point of the two kinds of Micikevicius et al., "FP8 Formats for Deep Learning" (arXiv 2209.05433),
// by integer arithmetic on the bits of fp32 and additions that are exact or round once: no instruction of a processor
// converts, and none meets a denormal number that it may flush.
#include <cstdint>

#include "core/numerics/bf16.hpp"

namespace tandem::numerics {

/// Sign, four bits of exponent, three of fraction. No infinity; the largest number is 448.
struct E4m3 {
  static constexpr int fraction = 3, bias = 7, largest_exponent = 8;
  static constexpr std::uint32_t largest = 0x7e, infinity = 0x7f, nan = 0x7f;
};
/// Sign, five bits of exponent, two of fraction: the upper half of an IEEE fp16. The largest number is 57344.
struct E5m2 {
  static constexpr int fraction = 2, bias = 15, largest_exponent = 15;
  static constexpr std::uint32_t largest = 0x7b, infinity = 0x7c, nan = 0x7f;
};

/// Bits of fp32 of the least number of a format that has a leading one, and what codes at that place are short of it.
template <class Format>
constexpr std::uint32_t fp8_least_normal = static_cast<std::uint32_t>(128 - Format::bias) << 23;
template <class Format>
constexpr int fp8_below_code = 23 - Format::fraction;
/// Bits of the power of two whose unit in the last place is a format's smallest number.
template <class Format>
constexpr std::uint32_t fp8_rounder = static_cast<std::uint32_t>(127 + 24 - Format::bias - Format::fraction) << 23;

/// Code of x: rounded to nearest, ties to even; a finite number beyond the largest is the largest. Infinity stays
/// infinity, in E4m3 NaN, which it has in place of it: what is not finite must stay so.
template <class Format>
TANDEM_HD std::uint8_t to_fp8(float x) {
  constexpr std::uint32_t infinity_of_float = 0x7f800000u;
  constexpr int below = fp8_below_code<Format>;
  const std::uint32_t all = float_bits(x), bits = all & 0x7fffffffu;
  const std::uint32_t small = float_bits(add(bits_float(bits), bits_float(fp8_rounder<Format>))) - fp8_rounder<Format>;
  const std::uint32_t rounded = bits + ((1u << (below - 1)) - 1u) + ((bits >> below) & 1u);
  const std::uint32_t normal =
      (rounded >> below) - (static_cast<std::uint32_t>(127 - Format::bias) << Format::fraction);
  const std::uint32_t any = bits < fp8_least_normal<Format> ? small : normal;
  const std::uint32_t finite = any < Format::largest ? any : Format::largest;
  const std::uint32_t special = bits == infinity_of_float ? Format::infinity : Format::nan;
  return static_cast<std::uint8_t>((bits < infinity_of_float ? finite : special) | all >> 31 << 7);
}

/// The number that a code stands for, exactly.
template <class Format>
TANDEM_HD float fp8_to_float(std::uint32_t code) {
  constexpr int below = fp8_below_code<Format>;
  constexpr std::uint32_t least = fp8_least_normal<Format>, binade = 1u << 23;
  const std::uint32_t magnitude = code & 0x7fu, place = magnitude << below;
  // Without a leading one a code counts steps, as it does from the least number that has one.
  const std::uint32_t small = float_bits(add(bits_float(place + least), -bits_float(least)));
  const std::uint32_t normal = place + least - binade;
  const std::uint32_t finite = magnitude < (1u << Format::fraction) ? small : normal;
  const bool is_infinity = Format::infinity != Format::nan && magnitude == Format::infinity;
  const std::uint32_t special = is_infinity ? 0x7f800000u : 0x7fc00000u;
  return bits_float((magnitude <= Format::largest ? finite : special) | (code & 0x80u) << 24);
}

/// Conversions of bf16, which every number of either format fits into.
template <class Format>
TANDEM_HD std::uint8_t to_fp8(bf16 x) {
  return to_fp8<Format>(bf16_to_float(x));
}
template <class Format>
TANDEM_HD bf16 fp8_to_bf16(std::uint32_t code) {
  return bf16{static_cast<std::uint16_t>(float_bits(fp8_to_float<Format>(code)) >> 16)};
}

}  // namespace tandem::numerics
