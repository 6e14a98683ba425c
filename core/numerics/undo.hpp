#pragma once
// Takes an update of AdamW back, to the bit. The inverse formulas estimate the old state from the new one and the
// gradient; what an estimate is off by, in units in the last place of what is stored, fits a byte for nearly every
// element. Moments come first, and the master from the direction that follows from them exactly. Moments in fp32 and
// masters are compared with their estimates when the update runs; moments that are rounded are not:
// core/numerics/undo_rounded.hpp. docs/design/0041-updates-that-are-taken-back.md has how large the differences are.
#include <cstdint>

#include "core/numerics/adam_state.hpp"

namespace tandem {

/// Coefficients of the inverse of an update.
struct AdamInverse {
  float beta1 = 0.0F;       ///< 1 / beta1
  float beta1_rest = 0.0F;  ///< the part of it below fp32
  float beta2 = 0.0F;
  float beta2_rest = 0.0F;
  float undecay = 0.0F;  ///< 1 / (1 - lr * weight_decay) - 1
  int m_octaves = 0;     ///< octaves that a rounded moment may grow by and be found again
  int v_octaves = 0;
};

namespace numerics {

/// Whether estimates are close enough to be worth it: below these bounds the old state is a small part of the new one.
inline bool is_invertible(const AdamCoefficients& c) {
  return c.beta1 >= 0.5F && c.beta2 >= 0.5F && c.minus_decay >= -0.5F && c.minus_decay <= 0.5F;
}

/// Whether a rounded moment may grow by an octave more than with smaller betas, and its estimate still be close enough.
inline bool forgets_little(float beta) { return beta >= 0.875F; }

inline AdamInverse adam_inverse(const AdamCoefficients& c) {
  const double beta1 = 1.0 / static_cast<double>(c.beta1), beta2 = 1.0 / static_cast<double>(c.beta2);
  const double decay = static_cast<double>(c.minus_decay);
  AdamInverse inverse;
  inverse.beta1 = static_cast<float>(beta1);
  inverse.beta1_rest = static_cast<float>(beta1 - static_cast<double>(inverse.beta1));
  inverse.beta2 = static_cast<float>(beta2);
  inverse.beta2_rest = static_cast<float>(beta2 - static_cast<double>(inverse.beta2));
  inverse.undecay = static_cast<float>(-decay / (1.0 + decay));
  inverse.m_octaves = forgets_little(c.beta1) ? 3 : 2;
  inverse.v_octaves = forgets_little(c.beta2) ? 1 : 0;
  return inverse;
}

/// A difference of stored bits in a few bits: `range` above the least that fits, or `escape`, and then the old bits are
/// kept.
constexpr std::uint32_t moment_range = 3;
constexpr std::uint32_t moment_escape = 7;
constexpr std::uint32_t master_range = 1;
constexpr std::uint32_t master_escape = 3;
constexpr int v_field = 3;  ///< its lowest bit in the code of an element; that of m is 0
constexpr int master_field = 6;

TANDEM_HD std::uint32_t moment_difference(std::uint32_t old, std::uint32_t estimate) {
  const std::uint32_t place = old - estimate + moment_range;
  return place < moment_escape ? place : moment_escape;
}
TANDEM_HD std::uint32_t master_difference(std::uint32_t old, std::uint32_t estimate) {
  const std::uint32_t place = old - estimate + master_range;
  return place < master_escape ? place : master_escape;
}

TANDEM_HD std::uint32_t undo_code(std::uint32_t of_m, std::uint32_t of_v, std::uint32_t of_master) {
  return of_m | of_v << v_field | of_master << master_field;
}
TANDEM_HD bool m_escapes(std::uint32_t code) { return (code & 0x07u) == 0x07u; }
TANDEM_HD bool v_escapes(std::uint32_t code) { return (code & 0x38u) == 0x38u; }
TANDEM_HD bool master_escapes(std::uint32_t code) { return (code & 0xc0u) == 0xc0u; }

/// Old bits from their estimate, where the code does not escape.
TANDEM_HD std::uint32_t old_m(std::uint32_t estimate, std::uint32_t code) {
  return estimate + (code & moment_escape) - moment_range;
}
TANDEM_HD std::uint32_t old_v(std::uint32_t estimate, std::uint32_t code) {
  return estimate + (code >> v_field & moment_escape) - moment_range;
}
TANDEM_HD std::uint32_t old_master(std::uint32_t estimate, std::uint32_t code) {
  return estimate + (code >> master_field) - master_range;
}

TANDEM_HD float magnitude(float x) { return bits_float(float_bits(x) & 0x7fffffffu); }

/// A power of two, by its exponent: the part of a new moment below which the rest that remains of it is but rounding.
/// The old one was zero then, or is kept as it was.
constexpr std::uint32_t fp32_resolution = 23;
constexpr std::uint32_t bf16_resolution = 7;

/// Whether something remains of a new moment once the gradient's part is taken from it. Compares bits.
TANDEM_HD bool remains(float rest, float next, std::uint32_t resolution) {
  const std::uint32_t least = float_bits(next) - (resolution << below_exponent);
  return static_cast<std::int32_t>(float_bits(rest)) > static_cast<std::int32_t>(least);
}

/// New moments less the gradient's part; `g` is the gradient, scaled.
TANDEM_HD float rest_of_m(float next, float g, const AdamCoefficients& c) {
  return add(next, -mul(c.one_minus_beta1, g));
}
TANDEM_HD float rest_of_v(float next, float g, const AdamCoefficients& c) {
  return fma(-mul(c.one_minus_beta2, g), g, next);
}

/// Estimates of moments in fp32 before an update, from those that it stored. Nothing remains of an m that began at
/// zero.
TANDEM_HD float estimate_m(float next, float g, const AdamCoefficients& c, const AdamInverse& inverse) {
  const float rest = rest_of_m(next, g, c);
  return fma(rest, inverse.beta1, mul(rest, inverse.beta1_rest));
}
TANDEM_HD float estimate_v(float next, float g, const AdamCoefficients& c, const AdamInverse& inverse) {
  const float rest = rest_of_v(next, g, c);
  if (!remains(rest, next, fp32_resolution)) return 0.0F;
  return fma(rest, inverse.beta2, mul(rest, inverse.beta2_rest));
}

/// Estimate of the master before an update; `direction` is that of the step, exactly.
TANDEM_HD float estimate_master(float next, float direction, const AdamCoefficients& c, const AdamInverse& inverse) {
  const float rest = fma(-c.minus_step_size, direction, next);
  return fma(rest, inverse.undecay, rest);
}

/// The moment that stored bits stand for.
template <StateFormat format>
TANDEM_HD float read_m(std::uint32_t bits, std::uint32_t exponent) {
  if constexpr (format == StateFormat::bf16_moments) return bits_float(bits << 16);
  if constexpr (format == StateFormat::byte_moments) return decode_m(bits, exponent);
  return bits_float(bits);
}
template <StateFormat format>
TANDEM_HD float read_v(std::uint32_t bits, std::uint32_t exponent) {
  if constexpr (format == StateFormat::bf16_moments) return bits_float(bits << 16);
  if constexpr (format == StateFormat::byte_moments) return decode_v(bits, exponent);
  return bits_float(bits);
}

}  // namespace numerics
}  // namespace tandem
