// Normally distributed numbers: that they are, and that each is the same wherever it is drawn.
#include "core/numerics/normal.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <numbers>
#include <vector>

#include "core/base/hash128.hpp"
#include "core/host/vectorised.hpp"

namespace tandem::numerics {
namespace {

TEST(Normal, TheLogarithmIsExactToTwelveDigits) {
  const double root = std::sqrt(0.5), least = std::ldexp(1.0, -52), last = 1.0 - least;
  std::vector<double> numbers{1.0, last, 1.0 - 0x1p-53, root, std::nextafter(root, 0.0), 0.70703125, 0.5, 0.75, least};
  for (std::uint64_t i = 0; i < 100000; ++i) numbers.push_back(bits_uniform(philox_block(1, 2, i), 0));
  for (const double u : numbers) {
    const auto exact = static_cast<double>(std::log(static_cast<long double>(u)));
    ASSERT_NEAR(log_of_uniform(u), exact, 1e-12 * std::abs(exact)) << u;
  }
  EXPECT_EQ(log_of_uniform(1.0), 0.0);
}

TEST(Normal, DirectionsAreExactToThirteenDigits) {
  std::vector<double> turns{1.0, 0.75, 0.5, 0.25, 0.125, 0.375, 0.625, 0.875, std::ldexp(1.0, -52)};
  for (std::uint64_t i = 0; i < 100000; ++i) turns.push_back(bits_uniform(philox_block(3, 4, i), 2));
  for (const double t : turns) {
    const long double angle = 2.0L * std::numbers::pi_v<long double> * static_cast<long double>(t);
    const Direction d = direction_of(t);
    ASSERT_NEAR(d.cosine, static_cast<double>(std::cos(angle)), 1e-13) << t;
    ASSERT_NEAR(d.sine, static_cast<double>(std::sin(angle)), 1e-13) << t;
  }
}

TEST(Normal, UniformOnesAreNeverZeroAndReachOne) {
  EXPECT_EQ(bits_uniform({{0, 0, 0, 0}}, 0), 1.0);
  EXPECT_EQ(bits_uniform({{0xffffffffU, 0xffffffffU, 0, 0}}, 0), std::ldexp(1.0, -52));
  EXPECT_EQ(bits_uniform({{0, 0, 0x80000000U, 0}}, 2), 0.5);
}

// A standard deviation of each figure is named; five of them are allowed.
TEST(Normal, MomentsAndTailsAreThoseOfTheDistribution) {
  constexpr std::uint64_t pairs = 1 << 20;
  constexpr double count = 2.0 * pairs;
  double sum = 0.0, squares = 0.0, fourth = 0.0, together = 0.0, largest = 0.0;
  std::array<double, 4> beyond{};
  for (std::uint64_t i = 0; i < pairs; ++i) {
    const NormalPair p = normal_pair(philox_block(5, 6, i));
    together += p.first * p.second;
    for (const double x : {p.first, p.second}) {
      sum += x;
      squares += x * x;
      fourth += x * x * x * x;
      largest = std::max(largest, std::abs(x));
      for (std::size_t s = 1; s < beyond.size(); ++s) beyond[s] += std::abs(x) > static_cast<double>(s) ? 1.0 : 0.0;
    }
  }
  EXPECT_NEAR(sum / count, 0.0, 5.0 * std::sqrt(1.0 / count));
  EXPECT_NEAR(squares / count, 1.0, 5.0 * std::sqrt(2.0 / count));
  EXPECT_NEAR(fourth / count, 3.0, 5.0 * std::sqrt(96.0 / count));
  EXPECT_NEAR(together / pairs, 0.0, 5.0 * std::sqrt(1.0 / pairs));
  for (std::size_t s = 1; s < beyond.size(); ++s) {
    const double share = std::erfc(static_cast<double>(s) / std::numbers::sqrt2);
    EXPECT_NEAR(beyond[s] / count, share, 5.0 * std::sqrt(share / count)) << s;
  }
  EXPECT_GT(largest, 4.5);
  EXPECT_LT(normal_pair({{0xffffffffU, 0xffffffffU, 0, 0}}).first, 8.5);
}

// Compilers, their options, and instruction sets change none of them: two people with one seed begin with one model.
TEST(Normal, BitsAreTheSameEverywhere) {
  for (const Isa isa : supported_isas()) {
    std::vector<double> values(20000);
    vectorised(
        [to = values.data(), pairs = values.size() / 2] {
          for (std::size_t i = 0; i < pairs; ++i) {
            const NormalPair p = normal_pair(philox_block(42, 7, i));
            to[2 * i] = p.first;
            to[2 * i + 1] = p.second;
          }
        },
        isa);
    Hash128 hash;
    hash.add(values.data(), values.size() * sizeof(double));
    EXPECT_EQ(hash.text(), "ed753750a6ab260f1e3ab9d2798fd191") << name_of(isa);
  }
}

}  // namespace
}  // namespace tandem::numerics
