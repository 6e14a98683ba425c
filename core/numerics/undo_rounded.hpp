#pragma once
// Takes rounded moments back: those in bf16, and those in a byte. Random bits round them, which are drawn again from
// the step, so that the new moment before it was rounded is known to half a unit of what is stored. The inverse formula
// makes of it the old one to within a few units, and the code of an element has the lowest bits of that, which say
// which of them it was. To record takes no estimate: an old moment that the new one has not outgrown is found.
// docs/design/0041-updates-that-are-taken-back.md has the bounds.
#include <cstdint>

#include "core/numerics/undo.hpp"

namespace tandem::numerics {

/// Lowest bits of old moments in the code of an element: those of m, then of v, below the field of the master.
constexpr std::uint32_t kept_m_bits = 15;
constexpr std::uint32_t kept_v_bits = 3;
constexpr int kept_v_field = 4;

TANDEM_HD std::uint32_t kept_code(std::uint32_t m, std::uint32_t v, std::uint32_t of_master) {
  return (m & kept_m_bits) | (v & kept_v_bits) << kept_v_field | of_master << master_field;
}

/// The greatest stored moment with these lowest bits, `mask` of them, that is no greater than `most`, which has `below`
/// bits below a unit.
TANDEM_HD std::uint32_t greatest_with(std::uint32_t kept, std::uint32_t mask, std::uint32_t most, int below) {
  return ((most - (kept << below)) >> below & ~mask) + kept;
}
/// The old moment near an estimate: m lies from 5.25 units below it to 10.75 above, v from 1.5 to 2.5. An estimate that
/// is too low may lie in octaves below, where units are smaller.
TANDEM_HD std::uint32_t near_m(std::uint32_t estimate, std::uint32_t kept, int below) {
  return greatest_with(kept, kept_m_bits, estimate + (43u << (below - 2)), below);
}
TANDEM_HD std::uint32_t near_v(std::uint32_t estimate, std::uint32_t kept, int below) {
  return greatest_with(kept, kept_v_bits, estimate + (5u << (below - 1)), below);
}

// -- moments in bf16

/// Bits of new moments, without a sign, that others than zero are found from: those from the least one on, so that both
/// are normal numbers, to below infinity.
constexpr std::uint32_t least_found_bf16 = 0x0400;
constexpr std::uint32_t bf16_infinity = 0x7f80;
TANDEM_HD bool finds_more_than_zero(std::uint32_t next) { return next >= least_found_bf16 && next < bf16_infinity; }
constexpr int bf16_octave = 7;  ///< binary logarithm of the units in an octave

/// Whether an old moment is found again from a new one that is no more than `octaves` larger; both without a sign.
TANDEM_HD bool finds_bf16(std::uint32_t old, std::uint32_t next, int octaves) {
  return finds_more_than_zero(next) && next <= old + (static_cast<std::uint32_t>(octaves) << bf16_octave);
}
TANDEM_HD bool finds_bf16_m(std::uint32_t old, std::uint32_t next, int octaves) {
  return old == 0 || finds_bf16(old & 0x7fffu, next & 0x7fffu, octaves);
}
/// A negative v is not found.
TANDEM_HD bool finds_bf16_v(std::uint32_t old, std::uint32_t next, int octaves) {
  return old == 0 || (old < 0x8000u && finds_bf16(old, next, octaves));
}

/// A new moment before its rounding, to half a unit; `random`: the bits that rounded it.
TANDEM_HD float unrounded_bf16(std::uint32_t next, std::uint32_t random) {
  return bits_float((next << 16) + 0x8000u - random);
}
TANDEM_HD std::uint32_t old_bf16_m(std::uint32_t next, std::uint32_t kept, std::uint32_t random, float g,
                                   const AdamCoefficients& c, const AdamInverse& inverse) {
  const float m = unrounded_bf16(next, random), rest = rest_of_m(m, g, c);
  if (!finds_more_than_zero(next & 0x7fffu) || !remains(magnitude(rest), magnitude(m), bf16_resolution)) return 0;
  return near_m(float_bits(mul(rest, inverse.beta1)), kept, 16);
}
TANDEM_HD std::uint32_t old_bf16_v(std::uint32_t next, std::uint32_t kept, std::uint32_t random, float g,
                                   const AdamCoefficients& c, const AdamInverse& inverse) {
  const float v = unrounded_bf16(next, random), rest = rest_of_v(v, g, c);
  if (!finds_more_than_zero(next) || !remains(rest, v, bf16_resolution)) return 0;
  return near_v(float_bits(mul(rest, inverse.beta2)), kept, 16);
}

// -- moments in a byte

/// Kept in place of the exponent of a block whose codes are all zero, which take nothing else.
constexpr std::uint32_t exponent_of_zeros = 0;

/// Codes by which a moment may have grown and is found, as if their blocks had one exponent. `most`: the exponent from
/// which on codes may have been bounded by the last there is; nothing is found then.
TANDEM_HD std::int32_t code_reach(std::uint32_t before, std::uint32_t after, int octaves, std::uint32_t most) {
  const std::int32_t reach = 8 * (octaves + static_cast<std::int32_t>(before) - static_cast<std::int32_t>(after));
  if (after >= most || reach < -255) return -255;
  return reach > 255 ? 255 : reach;
}
/// Below these, codes are not numbers to three bits.
constexpr std::uint32_t least_found_m = 8;
constexpr std::uint32_t least_found_v = 2;

TANDEM_HD bool finds_code(std::uint32_t old, std::uint32_t next, std::int32_t reach) {
  return static_cast<std::int32_t>(next) <= static_cast<std::int32_t>(old) + reach;
}
TANDEM_HD bool finds_m_code(std::uint32_t old, std::uint32_t next, std::int32_t reach) {
  const std::uint32_t o = old & most_m_code, n = next & most_m_code;
  return (old | next) == 0 || (o >= least_found_m && n >= least_found_m && finds_code(o, n, reach));
}
TANDEM_HD bool finds_v_code(std::uint32_t old, std::uint32_t next, std::int32_t reach) {
  return (old | next) == 0 || (old >= least_found_v && next >= least_found_v && finds_code(old, next, reach));
}

/// Half the distance of two codes.
constexpr std::uint32_t half_code = 1u << (below_code - 1);

/// Exponents of a moment's block before an update and after it.
struct BlockExponents {
  std::uint32_t before = 0;
  std::uint32_t after = 0;
};
/// `increment`: that of the rounding of the new code.
TANDEM_HD std::uint32_t old_m_code(std::uint32_t next, std::uint32_t kept, std::uint32_t increment, BlockExponents e,
                                   float g, const AdamCoefficients& c, const AdamInverse& inverse) {
  if (next == 0) return 0;
  const float size = m_at(((next & most_m_code) << below_code) + half_code - increment, e.after);
  const float m = bits_float(float_bits(size) | next >> 7 << 31);
  const float old = mul(rest_of_m(m, g, c), inverse.beta1);
  return near_m(place_of_m(magnitude(old), e.before), kept, below_code) | float_bits(old) >> 31 << 7;
}
TANDEM_HD std::uint32_t old_v_code(std::uint32_t next, std::uint32_t kept, std::uint32_t increment, BlockExponents e,
                                   float g, const AdamCoefficients& c, const AdamInverse& inverse) {
  if (next == 0) return 0;
  const float v = bits_float((next << below_code) + v_base(e.after) + half_code - increment);
  const float old = mul(rest_of_v(v, g, c), inverse.beta2);
  return near_v(float_bits(old) - v_base(e.before), kept, below_code);
}

}  // namespace tandem::numerics
