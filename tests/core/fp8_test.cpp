// Eight-bit floating point against its definition in double: every code, every bf16 value, and the fp32 values around
// every bound of rounding.
#include "core/numerics/fp8.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "core/numerics/fp8_scale.hpp"

namespace tandem {
namespace {

using numerics::bits_float;
using numerics::E4m3;
using numerics::E5m2;
using numerics::float_bits;

/// Number of a code without sign, by powers of two; NaN and infinity as the format has them.
template <class Format>
double defined(std::uint32_t code) {
  if (code > Format::largest) {
    return Format::infinity != Format::nan && code == Format::infinity ? HUGE_VAL : std::nan("");
  }
  constexpr std::uint32_t steps = 1u << Format::fraction;
  const std::uint32_t exponent = code / steps, fraction = code % steps;
  const double significand = exponent == 0 ? fraction : steps + fraction;
  return std::ldexp(significand, static_cast<int>(exponent == 0 ? 1 : exponent) - Format::bias - Format::fraction);
}

/// Nearest code of x, ties to the even one, by distances.
template <class Format>
std::uint32_t nearest(double x) {
  const double size = std::min(std::abs(x), defined<Format>(Format::largest));
  std::uint32_t best = 0;
  for (std::uint32_t code = 1; code <= Format::largest; ++code) {
    const double here = std::abs(defined<Format>(code) - size), before = std::abs(defined<Format>(best) - size);
    if (here < before || (here == before && code % 2 == 0)) best = code;
  }
  return best | (std::signbit(x) ? 0x80u : 0u);
}

template <class Format>
void expect_code(float x) {
  const std::uint32_t code = numerics::to_fp8<Format>(x), sign = float_bits(x) >> 31 << 7;
  if (std::isnan(x)) {
    ASSERT_EQ(code, Format::nan | sign) << float_bits(x);
  } else if (std::isinf(x)) {
    ASSERT_EQ(code, Format::infinity | sign) << x;
  } else {
    ASSERT_EQ(code, nearest<Format>(static_cast<double>(x))) << x;
  }
}

template <class Format>
class Fp8 : public ::testing::Test {};
using Formats = ::testing::Types<E4m3, E5m2>;
TYPED_TEST_SUITE(Fp8, Formats);

TYPED_TEST(Fp8, EveryCodeIsItsNumberInBothTypes) {
  for (std::uint32_t code = 0; code < 256; ++code) {
    const double expected = defined<TypeParam>(code & 127u) * (code < 128 ? 1.0 : -1.0);
    const float value = numerics::fp8_to_float<TypeParam>(code);
    const float narrow = numerics::bf16_to_float(numerics::fp8_to_bf16<TypeParam>(code));
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(value) && std::isnan(narrow)) << code;
    } else {
      EXPECT_EQ(static_cast<double>(value), expected) << code;
      EXPECT_EQ(float_bits(narrow), float_bits(value)) << code;
      EXPECT_EQ(std::signbit(value), code >= 128) << code;
      EXPECT_EQ(numerics::to_fp8<TypeParam>(value), code);
    }
  }
}

TYPED_TEST(Fp8, EveryBf16RoundsToTheNearestCode) {
  for (std::uint32_t bits = 0; bits < 0x10000u; ++bits) {
    const bf16 x{static_cast<std::uint16_t>(bits)};
    ASSERT_NO_FATAL_FAILURE(expect_code<TypeParam>(numerics::bf16_to_float(x)));
    ASSERT_EQ(numerics::to_fp8<TypeParam>(x), numerics::to_fp8<TypeParam>(numerics::bf16_to_float(x)));
  }
}

TYPED_TEST(Fp8, TiesAndTheirNeighboursRoundAsTheyShould) {
  for (std::uint32_t code = 0; code <= TypeParam::largest; ++code) {
    // Behind the last code lies the bound from which a wider format would round to the next one.
    const double next = code < TypeParam::largest ? defined<TypeParam>(code + 1)
                                                  : 2 * defined<TypeParam>(code) - defined<TypeParam>(code - 1);
    const float middle = static_cast<float>((defined<TypeParam>(code) + next) / 2);
    for (const float x : {middle, std::nextafter(middle, 0.0F), std::nextafter(middle, HUGE_VALF)}) {
      ASSERT_NO_FATAL_FAILURE(expect_code<TypeParam>(x));
      ASSERT_NO_FATAL_FAILURE(expect_code<TypeParam>(-x));
    }
  }
  const float most = std::numeric_limits<float>::max(), least = std::numeric_limits<float>::denorm_min();
  for (const float x : {most, -most, least, -least, 0.0F, -0.0F}) {
    ASSERT_NO_FATAL_FAILURE(expect_code<TypeParam>(x));
  }
}

/// x / 2^e rounded to the nearest code, by arithmetic in double.
template <class Format>
std::uint32_t code_by_arithmetic(double x, int e) {
  const double size = std::ldexp(std::abs(x), -e);
  const int least = 1 - Format::bias;
  const int power = size > 0.0 ? std::max(std::ilogb(size), least) : least;
  const double steps = std::nearbyint(std::ldexp(size, Format::fraction - power));
  // Steps beyond the binade carry into the exponent by themselves.
  const std::uint32_t above = static_cast<std::uint32_t>(power - least) << Format::fraction;
  const double code = std::min(above + steps, static_cast<double>(Format::largest));
  return static_cast<std::uint32_t>(code) | (std::signbit(x) ? 0x80u : 0u);
}

/// All of bf16 under every 9th scale, as far as a scale is ever used: up to four times beyond the largest number.
TYPED_TEST(Fp8, EveryBf16UnderScalesRoundsToTheNearestCode) {
  const int most = 127 - TypeParam::largest_exponent;
  for (int e = numerics::fp8_least_exponent; e <= most; e += 9) {
    for (std::uint32_t bits = 0; bits < 0x7f80u; ++bits) {
      const bf16 x{static_cast<std::uint16_t>(bits | static_cast<std::uint32_t>(e & 1) << 15)};
      const double value = static_cast<double>(numerics::bf16_to_float(x));
      if (std::abs(value) > std::ldexp(4 * defined<TypeParam>(TypeParam::largest), e)) break;
      const std::uint32_t code = numerics::to_scaled_fp8<TypeParam>(numerics::bf16_to_float(x), e);
      ASSERT_EQ(code, code_by_arithmetic<TypeParam>(value, e)) << bits << " under 2^" << e;
      const double back =
          static_cast<double>(numerics::bf16_to_float(numerics::scaled_fp8_to_bf16<TypeParam>(code, e)));
      ASSERT_EQ(back, std::ldexp(static_cast<double>(numerics::fp8_to_float<TypeParam>(code)), e)) << bits;
    }
  }
}

/// The least power of two under which nothing is beyond the largest number, within the bounds of exponents.
TYPED_TEST(Fp8, TheScaleIsTheLeastThatHoldsTheLargestElement) {
  const double largest = defined<TypeParam>(TypeParam::largest);
  const int most = 127 - TypeParam::largest_exponent;
  for (std::uint32_t bits = 0; bits < numerics::fp8_not_finite; bits += 0x3fff) {  // with those around three quarters
    const double x = static_cast<double>(bits_float(bits));
    const int e = numerics::fp8_exponent<TypeParam>(bits);
    ASSERT_GE(e, numerics::fp8_least_exponent);
    ASSERT_LE(e, most);
    if (e > numerics::fp8_least_exponent) {
      ASSERT_GT(x, std::ldexp(largest, e - 1)) << bits;
    }
    if (e < most) {
      ASSERT_LE(x, std::ldexp(largest, e)) << bits;
    }
  }
  for (const std::uint32_t bits : {0x3f5fffffu, 0x3f600000u, 0x3f600001u}) {
    EXPECT_EQ(numerics::fp8_exponent<TypeParam>(bits), -1 - TypeParam::largest_exponent + (bits > 0x3f600000u ? 1 : 0));
    EXPECT_EQ(numerics::fp8_magnitude(-bits_float(bits)), bits);
  }
  EXPECT_EQ(numerics::fp8_magnitude(bf16{0xff80}), numerics::fp8_not_finite);
  EXPECT_GT(numerics::fp8_magnitude(bf16{0xffc0}), numerics::fp8_not_finite);
}

}  // namespace
}  // namespace tandem
