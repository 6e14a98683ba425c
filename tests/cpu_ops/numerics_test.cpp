// The formulas of core/numerics against double, and the conversions over all exponents.
#include "core/numerics/activation.hpp"
#include "core/numerics/bf16.hpp"
#include "tests/cpu_ops/op_testing.hpp"

namespace tandem::testing {
namespace {

using numerics::bits_float;
using numerics::float_bits;

/// Every high half (sign, exponent, seven bits of fraction) with low halves around each rounding edge.
template <class Body>
void for_edge_floats(const Body& body) {
  for (std::uint32_t high = 0; high < 0x10000u; ++high) {
    for (const std::uint32_t low : {0x0000u, 0x0001u, 0x3fffu, 0x7fffu, 0x8000u, 0x8001u, 0xbfffu, 0xfffeu, 0xffffu}) {
      body((high << 16) | low);
    }
  }
}

/// The nearest bf16 by distances in double, ties by `tie_up`; for values whose neighbours are finite.
bf16 nearest(float x, bool ties_to_even) {
  const std::uint32_t low = float_bits(x) & 0xffff0000u;
  const double down = std::abs(static_cast<double>(x) - static_cast<double>(bits_float(low)));
  const double up = std::abs(static_cast<double>(bits_float(low + 0x10000u)) - static_cast<double>(x));
  const bool odd = ((low >> 16) & 1u) != 0;
  const bool take_up = up < down || (up == down && (ties_to_even ? odd : true));
  return bf16{static_cast<std::uint16_t>((take_up ? low + 0x10000u : low) >> 16)};
}

TEST(Bf16, EveryBf16SurvivesTheWayThroughFloat) {
  for (std::uint32_t bits = 0; bits < 0x10000u; ++bits) {
    const bf16 x{static_cast<std::uint16_t>(bits)};
    const float wide = numerics::bf16_to_float(x);
    const bool signalling = std::isnan(wide) && (bits & 0x40u) == 0;
    const std::uint16_t expected = static_cast<std::uint16_t>(signalling ? bits | 0x40u : bits);
    ASSERT_EQ(numerics::round_to_bf16(wide).bits, expected) << bits;
    ASSERT_EQ(numerics::weight_of_master(wide).bits, expected) << bits;
  }
}

TEST(Bf16, BothRoundingsAreTheNearest) {
  for_edge_floats([](std::uint32_t bits) {
    const float x = bits_float(bits);
    if (std::isnan(x)) {
      ASSERT_TRUE(std::isnan(numerics::bf16_to_float(numerics::round_to_bf16(x)))) << bits;
      ASSERT_TRUE(std::isnan(numerics::bf16_to_float(numerics::weight_of_master(x)))) << bits;
      ASSERT_EQ(numerics::round_to_bf16(x).bits >> 15, bits >> 31);
      return;
    }
    if ((bits & 0x7fff0000u) == 0x7f7f0000u || std::isinf(x)) return;  // the upper neighbour is infinite: below
    ASSERT_EQ(numerics::round_to_bf16(x).bits, nearest(x, true).bits) << std::hex << bits;
    ASSERT_EQ(numerics::weight_of_master(x).bits, nearest(x, false).bits) << std::hex << bits;
  });
}

TEST(Bf16, LargestValuesRoundToInfinityFromHalfTheLastStepOn) {
  EXPECT_EQ(numerics::round_to_bf16(bits_float(0x7f7f7fffu)).bits, 0x7f7f);
  EXPECT_EQ(numerics::round_to_bf16(bits_float(0x7f7f8000u)).bits, 0x7f80);
  EXPECT_EQ(numerics::weight_of_master(bits_float(0xff7f8000u)).bits, 0xff80);
  EXPECT_EQ(numerics::round_to_bf16(INFINITY).bits, 0x7f80);
  EXPECT_EQ(numerics::round_to_bf16(bits_float(0x7fffffffu)).bits, 0x7fff);  // the addition alone would give -0
  EXPECT_EQ(numerics::round_to_bf16(bits_float(0x7f800001u)).bits, 0x7fc0);  // a NaN whose payload is cut off
}

TEST(Bf16, WeightAndResidualJoinToTheirMaster) {
  for_edge_floats([](std::uint32_t bits) {
    if ((bits & 0x7f800000u) == 0x7f800000u) return;
    const float master = bits_float(bits);
    const float joined = numerics::join_master(numerics::weight_of_master(master), numerics::master_residual(master));
    ASSERT_EQ(float_bits(joined), bits) << std::hex << bits;
  });
}

/// Calls body(x) for floats spread over [low, high] evenly, `count` of them.
template <class Body>
void sweep(double low, double high, int count, const Body& body) {
  for (int i = 0; i <= count; ++i) body(static_cast<float>(low + (high - low) * i / count));
}

double relative(float actual, double expected) {
  return std::abs(static_cast<double>(actual) - expected) / std::abs(expected);
}

TEST(Functions, ExpIsWithin25em8AndExactAtTheEdges) {
  double worst = 0.0;
  sweep(-87.3, 88.7, 1000000,
        [&](float x) { worst = std::max(worst, relative(numerics::exp(x), std::exp(static_cast<double>(x)))); });
  EXPECT_LT(worst, 2.5e-7);
  RecordProperty("worst_exp", std::to_string(worst * 1e9) + "e-9");
  EXPECT_EQ(numerics::exp(0.0F), 1.0F);
  EXPECT_EQ(numerics::exp(-INFINITY), 0.0F);
  EXPECT_EQ(numerics::exp(-88.0F), 0.0F);
  EXPECT_EQ(numerics::exp(INFINITY), INFINITY);
  EXPECT_EQ(numerics::exp(89.0F), INFINITY);
  EXPECT_TRUE(std::isfinite(numerics::exp(88.722F)));
  EXPECT_TRUE(std::isnan(numerics::exp(NAN)));
}

TEST(Functions, LogisticIsWithin4em7) {
  double worst = 0.0;
  const auto see = [&](float x) {
    const numerics::Logistic s = numerics::logistic_within_80(x);
    const auto exact = [](double at) { return 1.0 / (1.0 + std::exp(-at)); };
    worst = std::max({worst, relative(s.value, exact(static_cast<double>(x))),
                      relative(s.complement, exact(-static_cast<double>(x)))});
  };
  sweep(-80.0, 80.0, 1000000, see);
  sweep(-1.0, 1.0, 1000000, see);
  EXPECT_LT(worst, 4e-7);
  RecordProperty("worst_logistic", std::to_string(worst * 1e9) + "e-9");
  EXPECT_EQ(numerics::logistic_within_80(0.0F).value, 0.5F);
}

double gelu_exact(double x) { return 0.5 * x * (1.0 + std::tanh(std::sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x))); }
double silu_exact(double x) { return x / (1.0 + std::exp(-x)); }

/// Derivative in double by a central difference of fourth order; good to 1e-11 here.
template <class F>
double derivative(const F& f, double x) {
  const double h = 1e-3;
  return (8.0 * (f(x + h) - f(x - h)) - (f(x + 2.0 * h) - f(x - 2.0 * h))) / (12.0 * h);
}

TEST(Activations, ValuesAndDerivativesAreThoseOfDouble) {
  double gelu = 0.0, dgelu = 0.0, silu = 0.0, dsilu = 0.0;
  sweep(-12.0, 12.0, 200000, [&](float x) {
    const double exact = static_cast<double>(x), unit = std::max(1.0, std::abs(exact));
    gelu = std::max(gelu, std::abs(static_cast<double>(numerics::gelu(x)) - gelu_exact(exact)) / unit);
    dgelu =
        std::max(dgelu, std::abs(static_cast<double>(numerics::gelu_derivative(x)) - derivative(gelu_exact, exact)));
    silu = std::max(silu, std::abs(static_cast<double>(numerics::silu(x)) - silu_exact(exact)) / unit);
    dsilu =
        std::max(dsilu, std::abs(static_cast<double>(numerics::silu_derivative(x)) - derivative(silu_exact, exact)));
  });
  EXPECT_LT(gelu, 1.5e-7);
  EXPECT_LT(dgelu, 1.2e-6);
  EXPECT_LT(silu, 1.8e-7);
  EXPECT_LT(dsilu, 9e-7);
  for (const auto derivative_of : {numerics::gelu_derivative, numerics::silu_derivative}) {
    for (const float large : {30.0F, 1e30F, INFINITY}) {
      EXPECT_EQ(derivative_of(large), 1.0F);
      EXPECT_NEAR(derivative_of(-large), 0.0F, 1e-11F);
    }
    EXPECT_TRUE(std::isnan(derivative_of(NAN)));
  }
  for (const auto activation : {numerics::gelu, numerics::silu}) {
    for (const float large : {90.0F, 1e30F, INFINITY}) {
      EXPECT_EQ(activation(large), large);
      EXPECT_NEAR(activation(-large), 0.0F, 1e-32F);
    }
    EXPECT_TRUE(std::isnan(activation(NAN)));
    // A NaN of other bits than usual, which integer arithmetic could turn into a number.
    EXPECT_TRUE(std::isnan(activation(bits_float(0xff812345u))));
  }
  std::printf("largest errors: gelu %.3g, its derivative %.3g, silu %.3g, its derivative %.3g\n", gelu, dgelu, silu,
              dsilu);
}

}  // namespace
}  // namespace tandem::testing
