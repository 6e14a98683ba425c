#pragma once
// Coded weights for tests of their decoding: codes of all kinds, of shapes whose blocks and bytes end anywhere.
#include <cstddef>
#include <cstring>
#include <vector>

#include "core/numerics/weight_codes.hpp"
#include "core/ops/ops.hpp"
#include "tests/cpu_ops/op_testing.hpp"

namespace tandem::testing {

constexpr WeightCode weight_codes[] = {WeightCode::int8, WeightCode::nf4, WeightCode::nf4_double, WeightCode::fp8};

inline const std::vector<Shape>& coded_shapes() {
  static const std::vector<Shape> shapes{{1, 1},     {2, 11},       {5, 64},    {3, 192},   {7, 200},
                                         {131, 136}, {3, 129, 136}, {3, 5, 11}, {2, 3, 72}, {257, 1001}};
  return shapes;
}

/// Any codes, NaNs of fp8 among them, with scales from small to large, and a zero.
struct RandomCodes {
  RandomCodes(WeightCode format, const Shape& of, unsigned seed) : code(format) {
    Random random(seed);
    const int rank = of.rank();
    const CodedShape shape{rank == 3 ? of[0] : 1, of[rank - 2], of[rank - 1]};
    bytes = std::vector<std::byte>(static_cast<std::size_t>((shape.count() * code_bits(code) + 7) / 8));
    for (std::byte& b : bytes) b = static_cast<std::byte>(random.bits() & 255u);
    scales = std::vector<float>(static_cast<std::size_t>(scale_floats(code, shape)));
    for (float& s : scales) s = std::ldexp(std::abs(random.normal()), random.below(30) - 15);
    scales.back() = 0.0F;
    if (code != WeightCode::nf4_double) return;
    std::vector<std::uint8_t> coded(static_cast<std::size_t>((numerics::nf4_blocks(shape) + 3) / 4 * 4));
    for (std::uint8_t& b : coded) b = static_cast<std::uint8_t>(random.bits() & 255u);
    std::memcpy(scales.data(), coded.data(), coded.size());
  }
  CodedWeight view() const { return {code, bytes.data(), scales.data()}; }

  WeightCode code;
  std::vector<std::byte> bytes;
  std::vector<float> scales;
};

}  // namespace tandem::testing
