// Codes of whole matrices of weights: those of Ops::quantize, whatever exponent was guessed, in each instruction set
// and on any number of threads.
#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "core/numerics/fp8_scale.hpp"
#include "cpu_ops/update/update_kernels.hpp"
#include "tests/cpu_ops/op_testing.hpp"

namespace tandem::testing {
namespace {

using numerics::E4m3;

std::vector<bf16> weights_of(std::size_t count, float deviation) {
  Random random(11);
  std::vector<bf16> weights(count);
  for (bf16& w : weights) w = numerics::round_to_bf16(random.normal(deviation));
  return weights;
}

/// Largest magnitude of the weights that the formula of an element sees, one after another.
std::uint32_t largest_of(const std::vector<bf16>& weights) {
  std::uint32_t largest = 0;
  for (const bf16 w : weights) largest = std::max(largest, numerics::fp8_magnitude(w));
  return largest;
}

std::vector<std::uint8_t> codes_of(const std::vector<bf16>& weights, int exponent) {
  std::vector<std::uint8_t> codes;
  for (const bf16 w : weights) {
    codes.push_back(numerics::to_scaled_fp8<E4m3>(numerics::bf16_to_float(w), exponent));
  }
  return codes;
}

constexpr int guesses[] = {-127, -100, -9, 0, 119};

TEST(Fp8Codes, AreThoseOfTheFormulaWhateverWasGuessed) {
  for (const std::size_t count : {1UL, 22UL, 55UL, 100'003UL, 300'000UL}) {
    for (const float deviation : {0.0F, 1e-38F, 1e-20F, 0.02F, 1e20F}) {
      const std::vector<bf16> weights = weights_of(count, deviation);
      const int exponent = numerics::fp8_exponent<E4m3>(largest_of(weights));
      const std::vector<std::uint8_t> expected = codes_of(weights, exponent);
      for (const auto& arena : arenas()) {
        const auto kernels = make_host_update_kernels(arena);
        std::vector<int> tried(std::begin(guesses), std::end(guesses));
        tried.push_back(exponent);
        for (const int guess : tried) {
          std::vector<std::uint8_t> codes(count, 0x55);
          EXPECT_EQ(kernels->fp8_codes(weights.data(), std::ssize(weights), guess, codes.data(), 1), exponent);
          ASSERT_EQ(codes, expected) << count << " of " << deviation << ", guessed " << guess;
        }
      }
    }
  }
}

TEST(Fp8Codes, AreTheSameInEveryInstructionSet) {
  const std::vector<bf16> weights = weights_of(100'003, 0.02F);
  for (const int exponent : guesses) {
    const std::vector<std::uint8_t> expected = codes_of(weights, exponent);
    for (const Isa isa : supported_isas()) {
      std::vector<std::uint8_t> codes(weights.size());
      EXPECT_EQ(encode_with(isa, weights.data(), exponent, codes.data(), std::ssize(weights)), largest_of(weights));
      EXPECT_EQ(codes, expected) << name_of(isa) << ", " << exponent;
    }
  }
}

/// A number times a power of two that bf16 holds: rounding the decoded weights again gives them back.
TEST(Fp8Codes, RoundedAgainAreTheSameNumbers) {
  for (const float deviation : {1e-38F, 1e-3F, 0.02F, 1.0F, 1e30F}) {
    for (unsigned seed = 0; seed < 50; ++seed) {
      Random random(seed);
      std::vector<bf16> weights(64);
      for (bf16& w : weights) w = numerics::round_to_bf16(random.normal(deviation));
      const auto round = [](std::vector<bf16> values) {
        const int e = numerics::fp8_exponent<E4m3>(largest_of(values));
        const std::vector<std::uint8_t> codes = codes_of(values, e);
        for (std::size_t i = 0; i < values.size(); ++i) {
          values[i] = numerics::scaled_fp8_to_bf16<E4m3>(codes[i], e);
        }
        return values;
      };
      const std::vector<bf16> once = round(weights), twice = round(once);
      for (std::size_t i = 0; i < once.size(); ++i) ASSERT_EQ(once[i].bits, twice[i].bits) << deviation << ", " << seed;
    }
  }
}

TEST(Fp8Codes, OfWhatIsNotFiniteAreNan) {
  for (const float special : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    std::vector<bf16> weights = weights_of(100'003, 0.02F);
    weights[77'777] = numerics::round_to_bf16(special);
    std::vector<std::uint8_t> codes(weights.size());
    const auto kernels = make_host_update_kernels(arenas()[1]);
    EXPECT_EQ(kernels->fp8_codes(weights.data(), std::ssize(weights), -9, codes.data(), 0), 0);
    EXPECT_EQ(std::ranges::count(codes, numerics::fp8_nan_code<E4m3>()), std::ssize(codes));
  }
}

TEST(Fp8Codes, TheExponentOfAScaleIsThatOfItsPower) {
  for (int e = numerics::fp8_least_exponent; e <= 119; ++e) {
    EXPECT_EQ(numerics::fp8_exponent_of(numerics::fp8_power(e)), e);
  }
}

}  // namespace
}  // namespace tandem::testing
