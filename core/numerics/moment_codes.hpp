#pragma once
// Adam's moments in a byte each, by integer arithmetic on the bits, so that every processor stores the same. Elements
// of a block share an exponent, that of the largest (block-wise quantization: Dettmers et al., "8-bit Optimizers via
// Block-wise Quantization", arXiv 2110.02861), and a code says where an element lies below it. Between two codes a
// moment is rounded stochastically: with a decay of 0.999 a step moves it by far less than the distance of two codes,
// and rounded to nearest it would stand still.
//
// m: sign, 4 bits of exponent, 3 of fraction: down to 2^-14 of the block's power of two with three bits, below that in
// steps of 2^-17. Those are rounded without bias too, so that what is small beside its neighbours still moves.
// v: 5 bits of exponent and 3 of fraction, down to 2^-31 of it, which is 2^-15.5 of its root. No v above zero becomes
// zero (which would make its update as large as eps allows: Li et al., "Memory Efficient Optimizers with 4-bit States",
// arXiv 2309.01507), but what lies below the smallest code becomes that.
//
// Values that were read from a block are stored without rounding, whatever part of it they are, so that state survives
// a checkpoint bit for bit.
#include <cstddef>
#include <cstdint>

#include "core/numerics/ieee.hpp"

namespace tandem {

/// Elements that share an exponent.
constexpr std::int64_t coded_block = 64;
/// A record is the codes of so many elements and then the exponents of their blocks, a byte each.
constexpr std::int64_t coded_record = 1024;
constexpr std::int64_t coded_record_bytes = coded_record + coded_record / coded_block;

/// Bytes of the records that hold `count` elements: the last one is whole.
constexpr std::size_t coded_bytes(std::int64_t count) noexcept {
  return static_cast<std::size_t>((count + coded_record - 1) / coded_record * coded_record_bytes);
}

/// Addresses of a block of one moment.
struct CodedBlock {
  std::uint8_t* codes;
  std::uint8_t* exponent;
};
/// The block that element `i` begins, or its part from `i` on.
TANDEM_HD CodedBlock coded_block_at(void* records, std::int64_t i) {
  const auto at = static_cast<std::uint64_t>(i), within = at % coded_record;  // unsigned divides by shifts alone
  std::uint8_t* const record = static_cast<std::uint8_t*>(records) + at / coded_record * coded_record_bytes;
  return {record + within, record + coded_record + within / coded_block};
}

namespace numerics {

/// Codes of a block that has a NaN; all its values decode to NaN: m as 0 times infinity, v by its bits. Infinity is
/// stored as the largest value.
constexpr std::uint32_t exponent_of_nan = 255;
constexpr std::uint8_t m_code_of_nan = 0;
constexpr std::uint8_t v_code_of_nan = 255;
constexpr std::uint32_t infinity_bits = 0x7f800000u;
/// Bits of a fraction below a code's, and of an exponent below it.
constexpr int below_code = 20;
constexpr int below_exponent = 23;

/// Increments that rounding adds below a code. Stochastic: 16 random bits, centred in the interval that they stand for;
/// to nearest: half.
TANDEM_HD std::uint32_t random_increment(std::uint32_t bits) { return (bits << 4) + 8u; }
constexpr std::uint32_t nearest_increment = 1u << (below_code - 1);

/// The exponent of a block whose largest magnitude has these bits, within two bounds. Above the last code of a power of
/// two it is the next one: could the largest not be rounded up, it would never grow beyond, since a step moves it by
/// less.
TANDEM_HD std::uint32_t block_exponent(std::uint32_t largest, std::uint32_t least, std::uint32_t most) {
  if (largest > infinity_bits) return exponent_of_nan;
  const std::uint32_t exponent = (largest + (1u << below_code) - 1) >> below_exponent;
  return exponent < least ? least : exponent > most ? most : exponent;
}

// -- m ----------------------------------------------------------------------------------------------------

/// Within these, the powers of two that scale are normal numbers.
constexpr std::uint32_t least_m_exponent = 1;
constexpr std::uint32_t most_m_exponent = 253;
/// Relative to the block's power of two: below it codes are equally far apart.
constexpr float m_linear_below = 0x1p-14F;
constexpr std::uint32_t m_linear_bits = (127u - 14u) << below_exponent;
constexpr std::uint32_t m_binade = 1u << below_exponent;
constexpr std::uint32_t most_m_code = 127;

/// Exponent of a block whose largest |m| has these bits.
TANDEM_HD std::uint32_t m_exponent(std::uint32_t largest) {
  return block_exponent(largest, least_m_exponent, most_m_exponent);
}

/// Magnitude of m at a place, its code with bits below, in a block of an exponent.
TANDEM_HD float m_at(std::uint32_t place, std::uint32_t exponent) {
  // Both ways of reading a magnitude; below the codes that both read alike the first is less, above them the second.
  const float linear = add(bits_float(place + m_linear_bits), -m_linear_below);
  const float normal = bits_float(place + m_linear_bits - m_binade);
  return mul(linear < normal ? linear : normal, bits_float(exponent << below_exponent));
}
/// The place of a magnitude.
TANDEM_HD std::uint32_t place_of_m(float magnitude, std::uint32_t exponent) {
  const float relative = mul(magnitude, bits_float((254u - exponent) << below_exponent));
  // The sum makes of the bits a fixed-point number. It is the larger where codes are equally far apart.
  const std::uint32_t linear = float_bits(add(relative, m_linear_below));
  const std::uint32_t normal = float_bits(relative) + m_binade;
  return (linear < normal ? normal : linear) - m_linear_bits;
}

TANDEM_HD float decode_m(std::uint32_t code, std::uint32_t exponent) {
  const float m = m_at((code & most_m_code) << below_code, exponent);
  return bits_float(float_bits(m) | (code >> 7) << 31);
}

/// Code of m in a block without a NaN; in one with a NaN any code.
TANDEM_HD std::uint8_t code_of_m(float m, std::uint32_t exponent, std::uint32_t increment) {
  const std::uint32_t place = place_of_m(bits_float(float_bits(m) & 0x7fffffffu), exponent);
  const std::uint32_t code = (place + increment) >> below_code;
  return static_cast<std::uint8_t>((code < most_m_code ? code : most_m_code) | float_bits(m) >> 31 << 7);
}

TANDEM_HD std::uint8_t encode_m(float m, std::uint32_t exponent, std::uint32_t increment) {
  return exponent == exponent_of_nan ? m_code_of_nan : code_of_m(m, exponent, increment);
}

// -- v ----------------------------------------------------------------------------------------------------

/// Codes of the lowest block are the upper bits of numbers themselves.
constexpr std::uint32_t least_v_exponent = 31;
constexpr std::uint32_t most_v_exponent = 254;
constexpr std::uint32_t most_v_code = 255;

/// Exponent of a block whose largest |v| has these bits.
TANDEM_HD std::uint32_t v_exponent(std::uint32_t largest) {
  return block_exponent(largest, least_v_exponent, most_v_exponent);
}

/// The bits of what would have code 0.
TANDEM_HD std::uint32_t v_base(std::uint32_t exponent) { return (exponent - least_v_exponent) << below_exponent; }

TANDEM_HD float decode_v(std::uint32_t code, std::uint32_t exponent) {
  return code == 0 ? 0.0F : bits_float((code << below_code) + v_base(exponent));
}

/// Code of v, as code_of_m. The sign is dropped: there is no negative v.
TANDEM_HD std::uint8_t code_of_v(float v, std::uint32_t exponent, std::uint32_t increment) {
  const std::uint32_t bits = float_bits(v) & 0x7fffffffu;
  const std::uint32_t rounded = bits + increment;
  const std::uint32_t lowest = v_base(exponent) + (1u << below_code);
  const std::uint32_t code = ((rounded < lowest ? lowest : rounded) - v_base(exponent)) >> below_code;
  const std::uint32_t least = code < most_v_code ? code : most_v_code;
  return static_cast<std::uint8_t>(bits == 0 ? 0 : least);
}

TANDEM_HD std::uint8_t encode_v(float v, std::uint32_t exponent, std::uint32_t increment) {
  return exponent == exponent_of_nan ? v_code_of_nan : code_of_v(v, exponent, increment);
}

}  // namespace numerics
}  // namespace tandem
