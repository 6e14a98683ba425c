#pragma once
// Takes an update of AdamW back, to the bit. The inverse formulas estimate the old state from the new one and the
// gradient; what an estimate is off by, in units in the last place of what is stored, fits a byte for nearly every
// element. Moments come first, and the master from the direction that follows from them exactly. Moments that are bytes
// themselves are not estimated: m is kept whole, and v as the number of codes between old and new.
// docs/design/0041-updates-that-are-taken-back.md has how large the differences are.
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
};

namespace numerics {

/// Whether estimates are close enough to be worth it: below these bounds the old state is a small part of the new one.
inline bool is_invertible(const AdamCoefficients& c) {
  return c.beta1 >= 0.5F && c.beta2 >= 0.5F && c.minus_decay >= -0.5F && c.minus_decay <= 0.5F;
}

inline AdamInverse adam_inverse(const AdamCoefficients& c) {
  const double beta1 = 1.0 / static_cast<double>(c.beta1), beta2 = 1.0 / static_cast<double>(c.beta2);
  const double decay = static_cast<double>(c.minus_decay);
  AdamInverse inverse;
  inverse.beta1 = static_cast<float>(beta1);
  inverse.beta1_rest = static_cast<float>(beta1 - static_cast<double>(inverse.beta1));
  inverse.beta2 = static_cast<float>(beta2);
  inverse.beta2_rest = static_cast<float>(beta2 - static_cast<double>(inverse.beta2));
  inverse.undecay = static_cast<float>(-decay / (1.0 + decay));
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

/// Bits that differences of moments wrap around in.
template <StateFormat format>
constexpr std::uint32_t moment_mask = format == StateFormat::bf16_moments ? 0xffffu : 0xffffffffu;

template <StateFormat format>
TANDEM_HD std::uint32_t moment_difference(std::uint32_t old, std::uint32_t estimate) {
  const std::uint32_t place = (old - estimate + moment_range) & moment_mask<format>;
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
template <StateFormat format>
TANDEM_HD std::uint32_t old_m(std::uint32_t estimate, std::uint32_t code) {
  return (estimate + (code & moment_escape) - moment_range) & moment_mask<format>;
}
template <StateFormat format>
TANDEM_HD std::uint32_t old_v(std::uint32_t estimate, std::uint32_t code) {
  return (estimate + (code >> v_field & moment_escape) - moment_range) & moment_mask<format>;
}
TANDEM_HD std::uint32_t old_master(std::uint32_t estimate, std::uint32_t code) {
  return estimate + (code >> master_field) - master_range;
}

// -- moments in a byte: the code of an element has a field for v below that of the master

/// Codes of v between an old one and the least above a new one whose difference fits. v falls by no more than beta2,
/// and rises by what the gradient brings.
constexpr std::uint32_t v_rise = 51;
constexpr std::uint32_t v_place_escape = 62;  ///< the old code is kept
constexpr std::uint32_t v_place_zero = 63;    ///< the old code was 0
constexpr std::uint32_t v_place_mask = 63;

/// Added to a difference of codes modulo 256, so that it counts from the least that fits; codes are compared as if
/// their blocks had one exponent.
TANDEM_HD std::uint8_t v_place_offset(std::uint32_t before, std::uint32_t after) {
  return static_cast<std::uint8_t>(v_rise + 8u * (before - after));
}
TANDEM_HD std::uint32_t v_place(std::uint8_t old, std::uint8_t next, std::uint8_t offset) {
  if (old == 0) return v_place_zero;
  const auto place = static_cast<std::uint8_t>(old - next + offset);
  return place < v_place_escape ? place : v_place_escape;
}
/// The old code, where the place is no escape.
TANDEM_HD std::uint8_t old_v_code(std::uint32_t place, std::uint8_t next, std::uint8_t offset) {
  return static_cast<std::uint8_t>(place == v_place_zero ? 0 : next + place - offset);
}

// -- other moments

TANDEM_HD float magnitude(float x) { return bits_float(float_bits(x) & 0x7fffffffu); }

/// A power of two: the part of a new moment below which the rest that remains of it is but rounding. The old one was
/// zero then, or is kept as it was.
template <StateFormat format>
constexpr std::uint32_t resolution = (format == StateFormat::bf16_moments ? 7u : 23u) << below_exponent;

/// Whether something remains of a new moment once the gradient's part is taken from it. Compares bits.
template <StateFormat format>
TANDEM_HD bool remains(float rest, float next) {
  return static_cast<std::int32_t>(float_bits(rest)) > static_cast<std::int32_t>(float_bits(next) - resolution<format>);
}

/// Estimates of the moments before an update, from those that it stored; `g` is the gradient, scaled.
template <StateFormat format>
TANDEM_HD float estimate_m(float next, float g, const AdamCoefficients& c, const AdamInverse& inverse) {
  const float rest = add(next, -mul(c.one_minus_beta1, g));
  // In fp32 nothing remains of a moment that began at zero.
  if constexpr (!rounds_moments(format)) return fma(rest, inverse.beta1, mul(rest, inverse.beta1_rest));
  return remains<format>(magnitude(rest), magnitude(next)) ? mul(rest, inverse.beta1) : 0.0F;
}
template <StateFormat format>
TANDEM_HD float estimate_v(float next, float g, const AdamCoefficients& c, const AdamInverse& inverse) {
  const float rest = fma(-mul(c.one_minus_beta2, g), g, next);
  if (!remains<format>(rest, next)) return 0.0F;
  if constexpr (rounds_moments(format)) return mul(rest, inverse.beta2);
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

/// Estimates of the bits that moments were stored as before an update, from those after it.
template <StateFormat format>
TANDEM_HD std::uint32_t estimate_stored_m(std::uint32_t next, float g, const AdamCoefficients& c,
                                          const AdamInverse& inverse) {
  const std::uint32_t m = float_bits(estimate_m<format>(read_m<format>(next, 0), g, c, inverse));
  return format == StateFormat::bf16_moments ? (m + 0x8000u) >> 16 : m;
}
template <StateFormat format>
TANDEM_HD std::uint32_t estimate_stored_v(std::uint32_t next, float g, const AdamCoefficients& c,
                                          const AdamInverse& inverse) {
  const std::uint32_t v = float_bits(estimate_v<format>(read_v<format>(next, 0), g, c, inverse));
  return format == StateFormat::bf16_moments ? (v + 0x8000u) >> 16 : v;
}

}  // namespace numerics
}  // namespace tandem
