// Rounded moments that an update has not outgrown are found again, whichever they were: all there are in bf16 and in a
// byte, rounded by the least and the most random bits as by others.
#include <cmath>

#include "core/numerics/undo_rounded.hpp"
#include "tests/cpu_ops/op_testing.hpp"

namespace tandem::testing {
namespace {

constexpr double tested_betas[] = {0.5, 0.8, 0.874, 0.875, 0.9, 0.95, 0.999};

AdamCoefficients coefficients_of(double beta) {
  return numerics::adam_coefficients({.beta1 = beta, .beta2 = beta, .eps = 1e-8, .weight_decay = 0.1}, 5, 1e-3, 1.0,
                                     true, 1);
}

/// Random bits of 16, those at the ends among them.
std::uint32_t rounding_bits(Random& random) {
  constexpr std::uint32_t ends[] = {0, 1, 0x7fff, 0x8000, 0xffff};
  return random.below(2) == 0 ? ends[random.below(5)] : random.bits() & 0xffffu;
}

/// A gradient by which a moment of this size changes its sign, its exponent, or nearly nothing.
float gradient_for(float size, double beta, Random& random) {
  const float most = static_cast<float>(16.0 / (1.0 - beta));
  const float part = std::exp2(-static_cast<float>(random.below(12)));
  return random.below(8) == 0 ? 0.0F : random.normal(most * part * (size + 1e-30F));
}

/// A gradient's addition to a moment of this size, over 1 - beta, by which the moment grows by whole octaves or nearly
/// so: the more octaves, the further off an estimate of the old moment is.
float octaves_for(float size, double beta, Random& random) {
  const float grown = size * std::exp2(static_cast<float>(random.below(4))) * (1.0F + random.normal(0.04F));
  return std::max(0.0F, (grown - static_cast<float>(beta) * size) / static_cast<float>(1.0 - beta));
}
float m_gradient(float value, double beta, Random& random) {
  if (random.below(2) == 0) return gradient_for(std::abs(value), beta, random);
  return std::copysign(octaves_for(std::abs(value), beta, random), value);
}
float v_gradient(float value, double beta, Random& random) {
  if (random.below(2) == 0) return gradient_for(std::sqrt(value), beta, random);
  return std::sqrt(octaves_for(value, beta, random));
}

/// How many moments of those that were tried were found.
struct Tally {
  std::int64_t tried = 0;
  std::int64_t found = 0;
};

TEST(UndoRounded, FindsEveryOldHalf) {
  Random random(41);
  for (const double beta : tested_betas) {
    const AdamCoefficients c = coefficients_of(beta);
    const AdamInverse inverse = numerics::adam_inverse(c);
    Tally m, v;
    for (std::uint32_t tried = 0; tried < 16 * 0x8000; ++tried) {
      const std::uint32_t old = tried & 0x7fffu, random_bits = rounding_bits(random);
      if (old >= numerics::bf16_infinity) continue;
      const float value = numerics::bits_float(old << 16);
      const std::uint32_t signed_old = old | (random.bits() & 0x8000u);
      const float g = m_gradient(numerics::bits_float(signed_old << 16), beta, random);
      const float root = v_gradient(value, beta, random);
      const std::uint32_t next_m =
          numerics::round_stochastically(numerics::adam_m(numerics::bits_float(signed_old << 16), g, c), random_bits)
              .bits;
      const std::uint32_t next_v = numerics::round_stochastically(numerics::adam_v(value, root, c), random_bits).bits;
      ++m.tried;
      ++v.tried;
      if (numerics::finds_bf16_m(signed_old, next_m, inverse.m_octaves)) {
        ++m.found;
        ASSERT_EQ(numerics::old_bf16_m(next_m, signed_old & numerics::kept_m_bits, random_bits, g, c, inverse),
                  signed_old)
            << next_m << ", " << random_bits << ", " << g << ", " << beta;
      }
      if (numerics::finds_bf16_v(old, next_v, inverse.v_octaves)) {
        ++v.found;
        ASSERT_EQ(numerics::old_bf16_v(next_v, old & numerics::kept_v_bits, random_bits, root, c, inverse), old)
            << next_v << ", " << random_bits << ", " << root << ", " << beta;
      }
    }
    EXPECT_GT(m.found, m.tried / 3) << beta;
    EXPECT_GT(v.found, v.tried / 4) << beta;
  }
}

/// Exponents of a block before an update, and of the same one after: enough for a moment, more where others are larger.
struct TestedBlock {
  std::uint32_t before, least, most;
  std::uint32_t after(std::uint32_t needed, Random& random) const {
    const auto other = static_cast<std::int32_t>(before) + random.below(7) - 3;
    return std::clamp(std::max(needed, static_cast<std::uint32_t>(std::max(other, 0))), least, most);
  }
};

void find_codes_of_m(const TestedBlock& exponents, double beta, Random& random, Tally& tally) {
  const AdamCoefficients c = coefficients_of(beta);
  const AdamInverse inverse = numerics::adam_inverse(c);
  for (std::uint32_t tried = 0; tried < 256 * 256; ++tried) {
    const std::uint32_t old = tried & 0xffu, increment = numerics::random_increment(rounding_bits(random));
    const float value = numerics::decode_m(old, exponents.before);
    const float g = m_gradient(value, beta, random), m = numerics::adam_m(value, g, c);
    const std::uint32_t after = exponents.after(numerics::m_exponent(numerics::float_bits(m) & 0x7fffffffu), random);
    const std::uint32_t next = numerics::encode_m(m, after, increment);
    ++tally.tried;
    const std::int32_t reach =
        numerics::code_reach(exponents.before, after, inverse.m_octaves, numerics::most_m_exponent);
    if (!numerics::finds_m_code(old, next, reach)) continue;
    ++tally.found;
    ASSERT_EQ(
        numerics::old_m_code(next, old & numerics::kept_m_bits, increment, {exponents.before, after}, g, c, inverse),
        old)
        << next << ", " << increment << ", " << g << ", " << beta << ", " << exponents.before << ", " << after;
  }
}

void find_codes_of_v(const TestedBlock& exponents, double beta, Random& random, Tally& tally) {
  const AdamCoefficients c = coefficients_of(beta);
  const AdamInverse inverse = numerics::adam_inverse(c);
  for (std::uint32_t tried = 0; tried < 256 * 256; ++tried) {
    const std::uint32_t old = tried & 0xffu, increment = numerics::random_increment(rounding_bits(random));
    const float value = numerics::decode_v(old, exponents.before);
    if (!std::isfinite(value)) continue;
    const float g = v_gradient(value, beta, random), v = numerics::adam_v(value, g, c);
    const std::uint32_t after = exponents.after(numerics::v_exponent(numerics::float_bits(v)), random);
    const std::uint32_t next = numerics::encode_v(v, after, increment);
    ++tally.tried;
    const std::int32_t reach =
        numerics::code_reach(exponents.before, after, inverse.v_octaves, numerics::most_v_exponent);
    if (!numerics::finds_v_code(old, next, reach)) continue;
    ++tally.found;
    ASSERT_EQ(
        numerics::old_v_code(next, old & numerics::kept_v_bits, increment, {exponents.before, after}, g, c, inverse),
        old)
        << next << ", " << increment << ", " << g << ", " << beta << ", " << exponents.before << ", " << after;
  }
}

TEST(UndoRounded, FindsEveryOldCode) {
  Random random(42);
  for (const double beta : tested_betas) {
    Tally m, v;
    for (const std::uint32_t before : {1U, 2U, 100U, 120U, 250U, 253U}) {
      find_codes_of_m({before, numerics::least_m_exponent, numerics::most_m_exponent}, beta, random, m);
    }
    for (const std::uint32_t before : {31U, 32U, 100U, 120U, 251U, 254U}) {
      find_codes_of_v({before, numerics::least_v_exponent, numerics::most_v_exponent}, beta, random, v);
    }
    EXPECT_GT(m.found, m.tried / 4) << beta;
    EXPECT_GT(v.found, v.tried / 5) << beta;
  }
}

}  // namespace
}  // namespace tandem::testing
