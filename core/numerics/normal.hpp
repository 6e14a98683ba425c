#pragma once
// Normally distributed numbers by a fixed sequence of IEEE operations in double, on the host: of the C library's
// logarithm, sine and cosine the last bit depends on its version and on the processor, and a compiler cannot vectorise
// them.
#include <bit>
#include <cmath>
#include <cstdint>
#include <numbers>

#include "core/numerics/random.hpp"

namespace tandem::numerics {

/// ln u of a normal number in (0, 1]: u = 2^e m with m in [sqrt(1/2), sqrt(2)), and ln m = 2 artanh((m - 1) / (m + 1)).
/// Within 1e-12 of it, and relative to it.
inline double log_of_uniform(double u) {
  constexpr std::uint32_t high_of_root = 0x3fe6a09eU;  // the upper half of sqrt(1/2), rounded down
  const auto bits = std::bit_cast<std::uint64_t>(u);
  const std::int32_t exponent = static_cast<std::int32_t>(static_cast<std::uint32_t>(bits >> 32) - high_of_root) >> 20;
  const double m =
      std::bit_cast<double>(bits - (static_cast<std::uint64_t>(static_cast<std::int64_t>(exponent)) << 52));
  const double s = (m - 1.0) / (m + 1.0), z = s * s;
  double p = 2.0 / 15.0;
  p = p * z + 2.0 / 13.0;
  p = p * z + 2.0 / 11.0;
  p = p * z + 2.0 / 9.0;
  p = p * z + 2.0 / 7.0;
  p = p * z + 2.0 / 5.0;
  p = p * z + 2.0 / 3.0;
  p = p * z + 2.0;
  return static_cast<double>(exponent) * std::numbers::ln2 + p * s;
}

struct Direction {
  double cosine, sine;
};

/// Cosine and sine of an angle in turns, 0 to 1, within 1e-13: the nearest quarter turn, and Taylor's series for the
/// rest, at most an eighth.
inline Direction direction_of(double turns) {
  constexpr double magic = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer, which its low bits are
  const double quarters = 4.0 * turns, shifted = quarters + magic;
  const double x = (quarters - (shifted - magic)) * (0.5 * std::numbers::pi), z = x * x;
  double s = 1.0 / 6227020800.0;
  s = s * z - 1.0 / 39916800.0;
  s = s * z + 1.0 / 362880.0;
  s = s * z - 1.0 / 5040.0;
  s = s * z + 1.0 / 120.0;
  s = s * z - 1.0 / 6.0;
  s = s * z * x + x;
  double c = -1.0 / 87178291200.0;
  c = c * z + 1.0 / 479001600.0;
  c = c * z - 1.0 / 3628800.0;
  c = c * z + 1.0 / 40320.0;
  c = c * z - 1.0 / 720.0;
  c = c * z + 1.0 / 24.0;
  c = c * z - 0.5;
  c = c * z + 1.0;
  const auto quarter = std::bit_cast<std::uint64_t>(shifted);
  const bool odd = (quarter & 1) != 0;
  const std::uint64_t cosine_sign = ((quarter + 1) & 2) << 62, sine_sign = (quarter & 2) << 62;
  return {std::bit_cast<double>(std::bit_cast<std::uint64_t>(odd ? s : c) ^ cosine_sign),
          std::bit_cast<double>(std::bit_cast<std::uint64_t>(odd ? c : s) ^ sine_sign)};
}

/// Uniform in (0, 1], 52 bits, from words `first` and `first + 1`, without a conversion of 64-bit integers, of which
/// processors without AVX-512 do one at a time.
inline double bits_uniform(const Philox128& bits, int first) {
  const std::uint64_t both = (std::uint64_t{bits.word[first]} << 32) | bits.word[first + 1];
  return 2.0 - std::bit_cast<double>((std::uint64_t{1023} << 52) | (both >> 12));
}

struct NormalPair {
  double first, second;
};

/// Two independent ones of mean 0 and deviation 1, at most 8.5 (Box and Muller, "A Note on the Generation of Random
/// Normal Deviates", 1958).
inline NormalPair normal_pair(const Philox128& bits) {
  const double radius = std::sqrt(-2.0 * log_of_uniform(bits_uniform(bits, 0)));
  const Direction direction = direction_of(bits_uniform(bits, 2));
  return {radius * direction.cosine, radius * direction.sine};
}

}  // namespace tandem::numerics
