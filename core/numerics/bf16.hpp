#pragma once
// bfloat16 as 16 bits, and its conversions by integer arithmetic. Hardware conversions are not used:
// some of them flush denormals, and CUDA's canonical NaN differs from the CPU's.
#include <cstdint>

#include "core/numerics/ieee.hpp"

namespace tandem {

/// The upper half of an IEEE fp32. Trivially copyable; arithmetic happens in fp32.
struct bf16 {
  std::uint16_t bits;
};
TANDEM_HD bool operator==(bf16 a, bf16 b) { return a.bits == b.bits; }

namespace numerics {

TANDEM_HD bool is_nan_bits(std::uint32_t bits) { return (bits & 0x7fffffffu) > 0x7f800000u; }

TANDEM_HD float bf16_to_float(bf16 x) { return bits_float(static_cast<std::uint32_t>(x.bits) << 16); }

/// Round to nearest, ties to even: gradients and activations. NaN is tested first (the rounding
/// addition alone would carry a NaN of all ones into -0) and stays a quiet NaN of the same sign.
TANDEM_HD bf16 round_to_bf16(float x) {
  const std::uint32_t bits = float_bits(x);
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const std::uint32_t quiet = (bits >> 16) | 0x0040u;
  return bf16{static_cast<std::uint16_t>(is_nan_bits(bits) ? quiet : rounded)};
}

/// Values of either type that activations have, as the fp32 in which arithmetic happens.
TANDEM_HD float to_float(float x) { return x; }
TANDEM_HD float to_float(bf16 x) { return bf16_to_float(x); }

/// Rounds to nearest even where T is bf16.
template <class T>
TANDEM_HD T from_float(float x);
template <>
TANDEM_HD float from_float<float>(float x) {
  return x;
}
template <>
TANDEM_HD bf16 from_float<bf16>(float x) {
  return round_to_bf16(x);
}

/// Round to nearest, ties away from zero: a weight from its fp32 master. Together with the low 16
/// bits (`master_residual`) it is lossless for every finite master, see `join_master`.
TANDEM_HD bf16 weight_of_master(float master) {
  const std::uint32_t bits = float_bits(master);
  const std::uint32_t rounded = (bits + 0x8000u) >> 16;
  const std::uint32_t quiet = (bits >> 16) | 0x0040u;
  return bf16{static_cast<std::uint16_t>(is_nan_bits(bits) ? quiet : rounded)};
}

/// `weight_of_master` for a master that is no NaN.
TANDEM_HD bf16 weight_of_number(float master) {
  return bf16{static_cast<std::uint16_t>((float_bits(master) + 0x8000u) >> 16)};
}

TANDEM_HD std::uint16_t master_residual(float master) {
  return static_cast<std::uint16_t>(float_bits(master) & 0xffffu);
}

/// Inverse of the pair (`weight_of_master`, `master_residual`): the high half is the weight less the
/// carry that rounding added, and that carry is the residual's top bit.
TANDEM_HD float join_master(bf16 weight, std::uint16_t residual) {
  const std::uint32_t high = (static_cast<std::uint32_t>(weight.bits) - (residual >> 15)) & 0xffffu;
  return bits_float((high << 16) | residual);
}

}  // namespace numerics
}  // namespace tandem
