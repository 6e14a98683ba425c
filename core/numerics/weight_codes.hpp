#pragma once
// Frozen weights in other formats: the code of an element, and the number that a code stands for, in single roundings
// of fp32, so that every processor agrees to the bit. docs/numerics.md has the formulas and where they come from.
#include <cstddef>
#include <cstdint>

#include "core/numerics/fp8.hpp"
#include "core/numerics/weight_code.hpp"

namespace tandem::numerics {

// -- int8 -------------------------------------------------------------------------------------------------

constexpr float most_int8 = 127.0F;

/// Scale of a row whose largest magnitude is this.
TANDEM_HD float int8_scale(float largest) { return div(largest, most_int8); }

/// Code of x: x / scale to the nearest integer, ties to even. Where the scale is 0 all are.
TANDEM_HD std::int8_t int8_code(float x, float scale) {
  constexpr float rounder = 0x1.8p23F;  // its unit in the last place is 1
  const float quotient = div(x, scale == 0.0F ? 1.0F : scale);
  const float low = quotient < -most_int8 ? -most_int8 : quotient;
  const float within = low > most_int8 ? most_int8 : low;
  const std::uint32_t code = float_bits(add(within, rounder)) - float_bits(rounder);
  return static_cast<std::int8_t>(scale == 0.0F ? 0u : code);
}

TANDEM_HD float int8_value(std::int8_t code, float scale) { return mul(static_cast<float>(code), scale); }

// -- nf4 --------------------------------------------------------------------------------------------------

constexpr std::uint32_t nf4_codes = 16;
/// Code of zero.
constexpr std::uint32_t nf4_zero = 7;

/// Number of a code, relative to its block's largest magnitude: quantiles of the normal distribution, as bitsandbytes
/// has them (QLoRA, appendix E).
TANDEM_HD float nf4_relative(std::uint32_t code) {
  constexpr float values[nf4_codes] = {
      -1.0F,
      -0.6961928009986877F,
      -0.5250730514526367F,
      -0.39491748809814453F,
      -0.28444138169288635F,
      -0.18477343022823334F,
      -0.09105003625154495F,
      0.0F,
      0.07958029955625534F,
      0.16093020141124725F,
      0.24611230194568634F,
      0.33791524171829224F,
      0.44070982933044434F,
      0.5626170039176941F,
      0.7229568362236023F,
      1.0F,
  };
  return values[code];
}

/// The least magnitude that blocks are divided by, so that one of zeros is zeros.
constexpr float least_absmax = 1e-38F;

/// Factor that makes elements of a block relative to its largest magnitude.
TANDEM_HD float relative_factor(float absmax) { return div(1.0F, absmax < least_absmax ? least_absmax : absmax); }

/// The nearest code; of two at the same distance the lower one.
TANDEM_HD std::uint32_t nf4_code(float relative) {
  std::uint32_t code = 0;
  for (std::uint32_t i = 0; i + 1 < nf4_codes; ++i) {
    code += relative > mul(0.5F, add(nf4_relative(i), nf4_relative(i + 1))) ? 1u : 0u;
  }
  return code;
}

/// Code of element `i` of an array of two in a byte.
TANDEM_HD std::uint32_t nf4_code_at(const std::byte* codes, std::int64_t i) {
  const auto both = static_cast<std::uint32_t>(codes[i / 2]);
  return i % 2 == 0 ? both >> 4 : both & 15u;
}

TANDEM_HD float nf4_value(std::uint32_t code, float absmax) { return mul(nf4_relative(code), absmax); }

/// Power of ten of decade 0 to 6.
TANDEM_HD float decade_of_scales(int decade) {
  const float low = decade == 0 ? 1e-6F : decade == 1 ? 1e-5F : decade == 2 ? 1e-4F : 1e-3F;
  return decade < 4 ? low : decade == 4 ? 1e-2F : decade == 5 ? 1e-1F : 1.0F;
}

/// Number of a byte that stands for a scale, relative to the largest of its block: the signed dynamic map of
/// bitsandbytes (Dettmers, arXiv 1511.04561). From code 128 up each power of ten has twice the numbers of the one
/// below, which lie in the middle between equidistant bounds; below 127, which is zero, are their negatives; the last
/// is 1.
TANDEM_HD float scale_of_byte(std::uint32_t byte) {
  constexpr std::uint32_t zero = 127, one = 255;
  if (byte == zero) return 0.0F;
  if (byte == one) return 1.0F;
  const std::uint32_t number = byte > zero ? byte - zero : zero - byte;
  int decade = 0;
  while (number >> (decade + 1) != 0) ++decade;
  const std::uint32_t count = 1u << decade, place = number - count;
  const float step = div(0.9F, static_cast<float>(count));
  // The bounds count from the end that is nearer, as PyTorch's linspace does.
  const auto bound = [=](std::uint32_t i) {
    return i < (count + 1) / 2 ? fma(step, static_cast<float>(i), 0.1F)
                               : fma(-step, static_cast<float>(count - i), 1.0F);
  };
  const float magnitude = mul(decade_of_scales(decade), mul(0.5F, add(bound(place), bound(place + 1))));
  return byte > zero ? magnitude : -magnitude;
}

/// Scales of blocks of NF4 as they are stored: floats, or bytes with an offset and a scale for each nf4_scale_block.
struct Nf4Scales {
  const float* floats = nullptr;  ///< null: they are bytes
  const std::uint8_t* bytes = nullptr;
  const float* of_bytes = nullptr;  ///< the offset, and then the scales of the bytes
};

constexpr std::int64_t parts_of(std::int64_t count, std::int64_t part) { return (count + part - 1) / part; }

/// Blocks of NF4 of a coded weight.
constexpr std::int64_t nf4_blocks(const CodedShape& shape) {
  return shape.matrices * parts_of(shape.rows * shape.columns, nf4_block);
}

/// `scales`: all of a coded weight, as scale_floats() has them.
TANDEM_HD Nf4Scales nf4_scales(WeightCode code, const CodedShape& shape, const float* scales) {
  if (code == WeightCode::nf4) return {scales, nullptr, nullptr};
  return {nullptr, reinterpret_cast<const std::uint8_t*>(scales), scales + (nf4_blocks(shape) + 3) / 4};
}

/// Largest magnitude of a block whose scale is a byte; `relative`: scale_of_byte() of that.
TANDEM_HD float absmax_of_byte(const Nf4Scales& scales, std::int64_t block, float relative) {
  return add(mul(relative, scales.of_bytes[1 + block / nf4_scale_block]), scales.of_bytes[0]);
}

/// Largest magnitude of a block, with which its codes are multiplied.
TANDEM_HD float absmax_of(const Nf4Scales& scales, std::int64_t block) {
  if (scales.floats != nullptr) return scales.floats[block];
  return absmax_of_byte(scales, block, scale_of_byte(scales.bytes[block]));
}

// -- fp8 --------------------------------------------------------------------------------------------------

constexpr float most_e4m3 = 448.0F;

/// Scale of a block of FP8 whose largest magnitude is this.
TANDEM_HD float fp8_scale(float largest) { return div(largest, most_e4m3); }
TANDEM_HD std::uint8_t fp8_code(float x, float scale) {
  return scale == 0.0F ? std::uint8_t{0} : to_fp8<E4m3>(div(x, scale));
}
TANDEM_HD float fp8_value(std::uint32_t code, float scale) { return mul(fp8_to_float<E4m3>(code), scale); }

// -- any of them ------------------------------------------------------------------------------------------

/// Elements in a row that share a scale.
struct ScaleRun {
  std::int64_t scale = 0;  ///< number of the scale; of nf4_double, of the byte that it is
  std::int64_t end = 0;    ///< one past the last element, from the beginning of the weight
};

/// The run that element `i` is in, of any code but none.
TANDEM_HD ScaleRun scale_run(WeightCode code, const CodedShape& shape, std::int64_t i) {
  const std::int64_t row = i / shape.columns, row_end = (row + 1) * shape.columns;
  if (code == WeightCode::int8) return {row, row_end};
  const std::int64_t matrix = row / shape.rows, each = shape.rows * shape.columns;
  if (code == WeightCode::fp8) {
    const std::int64_t wide = parts_of(shape.columns, fp8_side), high = parts_of(shape.rows, fp8_side);
    const std::int64_t column = i - row * shape.columns, block = column / fp8_side;
    const std::int64_t end = i - column + (block + 1) * fp8_side;
    return {(matrix * high + row % shape.rows / fp8_side) * wide + block, end < row_end ? end : row_end};
  }
  const std::int64_t first = matrix * each, block = (i - first) / nf4_block;
  const std::int64_t end = (block + 1) * nf4_block;
  return {matrix * parts_of(each, nf4_block) + block, first + (end < each ? end : each)};
}

}  // namespace tandem::numerics
