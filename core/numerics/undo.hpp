#pragma once
// Takes an update of AdamW back, to the bit. The inverse formulas estimate the old state from the new one and the
// gradient; what an estimate is off by, in units in the last place of what is stored, fits a byte for nearly every
// element. Moments come first, and the master from the direction that follows from them exactly.
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

/// Bits that differences of moments wrap around in. Coded ones have more than a code, as an estimate may lie beyond it.
template <StateFormat format>
constexpr std::uint32_t moment_mask = format == StateFormat::bf16_moments   ? 0xffffu
                                      : format == StateFormat::byte_moments ? 0xffffffffu >> below_code
                                                                            : 0xffffffffu;

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

TANDEM_HD float magnitude(float x) { return bits_float(float_bits(x) & 0x7fffffffu); }

/// A power of two: the part of a new moment below which the rest that remains of it is but rounding. The old one was
/// zero then, or is kept as it was.
template <StateFormat format>
constexpr std::uint32_t resolution = (format == StateFormat::bf16_moments   ? 7u
                                      : format == StateFormat::byte_moments ? 3u
                                                                            : 23u)
                                     << below_exponent;

/// Whether something remains of a new moment once the gradient's part is taken from it. Compares bits.
template <StateFormat format>
TANDEM_HD bool remains(float rest, float next) {
  return static_cast<std::int32_t>(float_bits(rest)) > static_cast<std::int32_t>(float_bits(next) - resolution<format>);
}

/// Estimates of the moments before an update, from those that it stored; `g` is the gradient, scaled. For all formats
/// but byte_moments.
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

/// The power of two between two exponents of blocks, within bounds.
TANDEM_HD float power_between(std::uint32_t after, std::uint32_t before) {
  const std::uint32_t exponent = after + 127u < before + 1u ? 1u : after + 127u - before;
  return bits_float((exponent < 253u ? exponent : 253u) << below_exponent);
}

/// Estimates of the codes of moments before an update, those of m from what is relative to the powers of two of the
/// blocks.
TANDEM_HD std::uint32_t estimate_m_code(std::uint32_t next, std::uint32_t after, float g, const AdamCoefficients& c,
                                        const AdamInverse& inverse, std::uint32_t before) {
  const float relative = decode_m(next, 127);
  const float part = mul(c.one_minus_beta1, bits_float((254u - after) << below_exponent));
  const float rest = fma(-part, g, relative);
  if (!remains<StateFormat::byte_moments>(magnitude(rest), magnitude(relative))) return 0;
  const float old = mul(magnitude(rest), mul(inverse.beta1, power_between(after, before)));
  const std::uint32_t linear = float_bits(add(old, m_linear_below)), normal = float_bits(old) + m_binade;
  const std::uint32_t place = (linear < normal ? normal : linear) - m_linear_bits + nearest_increment;
  return (place | (float_bits(rest) >> 4 & 0x80u << below_code)) >> below_code;
}
TANDEM_HD std::uint32_t estimate_v_code(std::uint32_t next, std::uint32_t after, float g, const AdamCoefficients& c,
                                        const AdamInverse& inverse, std::uint32_t before) {
  constexpr StateFormat format = StateFormat::byte_moments;
  const float v = decode_v(next, after);
  const float rest = fma(-mul(c.one_minus_beta2, g), g, v);
  if (next == 0 || !remains<format>(rest, v)) return 0;
  return (float_bits(mul(rest, inverse.beta2)) + nearest_increment - v_base(before)) >> below_code;
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

/// Estimates of the bits that moments were stored as before an update, from those after it, with the exponents of their
/// blocks.
template <StateFormat format>
TANDEM_HD std::uint32_t estimate_stored_m(std::uint32_t next, std::uint32_t after, float g, const AdamCoefficients& c,
                                          const AdamInverse& inverse, std::uint32_t before) {
  if constexpr (format == StateFormat::byte_moments) return estimate_m_code(next, after, g, c, inverse, before);
  const std::uint32_t m = float_bits(estimate_m<format>(read_m<format>(next, after), g, c, inverse));
  return format == StateFormat::bf16_moments ? (m + 0x8000u) >> 16 : m;
}
template <StateFormat format>
TANDEM_HD std::uint32_t estimate_stored_v(std::uint32_t next, std::uint32_t after, float g, const AdamCoefficients& c,
                                          const AdamInverse& inverse, std::uint32_t before) {
  if constexpr (format == StateFormat::byte_moments) return estimate_v_code(next, after, g, c, inverse, before);
  const std::uint32_t v = float_bits(estimate_v<format>(read_v<format>(next, after), g, c, inverse));
  return format == StateFormat::bf16_moments ? (v + 0x8000u) >> 16 : v;
}

}  // namespace numerics
}  // namespace tandem
