#pragma once
// The global gradient norm as a reduction of fixed shape. A block is one layout quantum of 1,024 elements. Its sum of
// squares: 32 lanes, lane j adds elements j, j + 32, j + 64, ... in order with one fp64 fused multiply-add each, then
// the lanes are added pairwise at distances 16, 8, 4, 2, 1. A layer's blocks are then added in order, and the layers in
// theirs. Subgroup size, processor and thread count do not enter. fp64: the square of a bf16 is exact there, and no
// finite gradient overflows it; the same holds for fp32, whose squares have 48 bits.
#include <cstdint>

#include "core/numerics/bf16.hpp"

namespace tandem::numerics {

constexpr int norm_lanes = 32;

TANDEM_HD float widened(bf16 x) { return bf16_to_float(x); }
TANDEM_HD float widened(float x) { return x; }

/// Sum of squares of one block of `count` <= 1,024 elements, bf16 or float.
template <class T>
TANDEM_HD double norm_block(const T* gradient, std::int64_t count) {
  double lane[norm_lanes] = {};
  for (std::int64_t i = 0; i < count; ++i) {
    const double g = static_cast<double>(widened(gradient[i]));
    lane[i % norm_lanes] += g * g;  // exact product: contraction cannot change it
  }
  for (int distance = norm_lanes / 2; distance > 0; distance /= 2) {
    for (int j = 0; j < distance; ++j) lane[j] += lane[j + distance];
  }
  return lane[0];
}

}  // namespace tandem::numerics
