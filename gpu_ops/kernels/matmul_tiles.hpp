#pragma once
// Shared parts of plain matrix products: 64 x 64 tiles of a result, 16 x 16 threads with 4 x 4 sums each, factors
// through shared memory as fp32. Sums run in order.
#include <kernel_language.hpp>

#include "core/numerics/ieee.hpp"
#include "gpu_ops/base/geometry.hpp"

namespace tandem::gpu {

/// Sizes of a tile, and of what passes through shared memory at once.
struct PlainTiling {
  static constexpr int rows = 64;
  static constexpr int depth = 16;
  static constexpr int side = 16;
  static constexpr int each = rows / side;
  /// Rows of the tiles in shared memory, apart by one more than a multiple of the banks.
  static constexpr int pitch = rows + 1;
  static constexpr int room = depth * pitch;
};

/// Stages value(r, c) of row r of a tile and term c of the sums as to[c][r]. `along_rows`: neighbouring threads take
/// neighbouring rows, else neighbouring terms.
template <class Value>
TANDEM_DEVICE void stage_values(bool along_rows, float* to, const Value& value) {
  using Size = PlainTiling;
  for (int i = thread_index(); i < Size::rows * Size::depth; i += most_threads) {
    const int r = along_rows ? i % Size::rows : i / Size::depth, c = along_rows ? i / Size::rows : i % Size::depth;
    to[c * Size::pitch + r] = value(r, c);
  }
}

/// The sums of a thread.
struct PlainSums {
  float x[PlainTiling::each][PlainTiling::each];
};

/// sums += the product of both staged tiles.
TANDEM_DEVICE void multiply(const float* a, const float* b, PlainSums& sums) {
  using Size = PlainTiling;
  const int row = thread_index() / Size::side, column = thread_index() % Size::side;
  for (int k = 0; k < Size::depth; ++k) {
    float u[Size::each], v[Size::each];
    for (int i = 0; i < Size::each; ++i) {
      u[i] = a[k * Size::pitch + row + i * Size::side];
      v[i] = b[k * Size::pitch + column + i * Size::side];
    }
    for (int i = 0; i < Size::each; ++i) {
      for (int j = 0; j < Size::each; ++j) sums.x[i][j] = numerics::fma(u[i], v[j], sums.x[i][j]);
    }
  }
}

/// Calls body(row, column, sum) for the sums of this thread, by where they lie in the tile.
template <class Body>
TANDEM_DEVICE void for_sums(const PlainSums& sums, const Body& body) {
  using Size = PlainTiling;
  TANDEM_UNROLL
  for (int i = 0; i < Size::each; ++i) {
    TANDEM_UNROLL
    for (int j = 0; j < Size::each; ++j) {
      body(thread_index() / Size::side + i * Size::side, thread_index() % Size::side + j * Size::side, sums.x[i][j]);
    }
  }
}

}  // namespace tandem::gpu
