#pragma once
// Shared parts of the attention kernels in fp32: tiles of rows of one head in shared memory. A quad owns a row of the
// block's tile: each thread has every fourth score of the row, and a quarter of its dimensions in pieces of four.
#include <kernel_language.hpp>

#include "gpu_ops/kernels/attention_operands.hpp"

namespace tandem::gpu {

/// Sizes for heads of up to `dim` dimensions.
template <int dim>
struct Tiling {
  static constexpr int dimensions = dim;
  static constexpr int rows = dim <= 128 ? 32 : 16;  ///< rows of a tile, queries or keys
  static constexpr int threads = rows * quad;
  static constexpr int pitch = dim + 4;         ///< floats from one row of a tile to the next, off the banks
  static constexpr int score_pitch = rows + 1;  ///< floats from one row of a tile of scores to the next
  static constexpr int tile_floats = rows * pitch;
  static constexpr int score_floats = rows * score_pitch;
  static constexpr int own_scores = rows / quad;       ///< scores of a row for each thread of its quad
  static constexpr int own_pieces = dim / (quad * 4);  ///< pieces of four dimensions for each thread
};

/// Four floats of shared memory at once.
struct Four {
  float x[4];
};
TANDEM_DEVICE Four load_four(const float* from) {
  const Words w = load_words(from);
  return {{numerics::bits_float(w.word[0]), numerics::bits_float(w.word[1]), numerics::bits_float(w.word[2]),
           numerics::bits_float(w.word[3])}};
}

/// Rows [first, first + rows) of a head into a tile; zeros behind the last token and the last dimension.
template <int dim>
TANDEM_DEVICE void stage_rows(const Head<float>& head, std::int64_t first, const AttentionShape& shape, bool aligned,
                              float* tile) {
  using Size = Tiling<dim>;
  constexpr int packets = dim / packet;
  for (int i = thread_index(); i < Size::rows * packets; i += Size::threads) {
    const int row = i / packets, at = i % packets * packet;
    Floats values = {};
    if (first + row < shape.sequence && at < shape.head_dim) {
      values = load(head.data + (first + row) * head.stride, span_at(at, shape.head_dim, aligned));
    }
    wide_store(tile + row * Size::pitch + at, values);
  }
}

/// This thread's scores of a row: its products with every fourth row of a tile.
template <int dim>
struct Scores {
  float x[Tiling<dim>::own_scores];
};

/// Row of the tile that score j belongs to.
TANDEM_DEVICE int column_of(int j) { return thread_index() % quad + j * quad; }

template <int dim>
TANDEM_DEVICE Scores<dim> row_products(const float* row, const float* tile) {
  Scores<dim> products = {};
  TANDEM_UNROLL_BY(4)  // more would not fit the registers
  for (int d = 0; d < dim; d += 4) {
    const Four u = load_four(row + d);
    TANDEM_UNROLL
    for (int j = 0; j < Tiling<dim>::own_scores; ++j) {
      const Four v = load_four(tile + column_of(j) * Tiling<dim>::pitch + d);
      for (int i = 0; i < 4; ++i) products.x[j] = numerics::fma(u.x[i], v.x[i], products.x[j]);
    }
  }
  return products;
}

/// A thread's share of a row: four dimensions of every sixteen.
template <int dim>
struct Quarter {
  Four piece[Tiling<dim>::own_pieces];
};

/// Dimension of element 0 of a piece.
TANDEM_DEVICE int dimension_of(int piece) { return piece * quad * 4 + thread_index() % quad * 4; }

/// share += factor * (this thread's dimensions of a row of a tile).
template <int dim>
TANDEM_DEVICE void add_row_times(Quarter<dim>& share, float factor, const float* row) {
  for (int p = 0; p < Tiling<dim>::own_pieces; ++p) {
    const Four value = load_four(row + dimension_of(p));
    for (int i = 0; i < 4; ++i) share.piece[p].x[i] = numerics::fma(factor, value.x[i], share.piece[p].x[i]);
  }
}

/// Writes the row of token t times `factor`.
template <int dim>
TANDEM_DEVICE void write_row(const Head<float>& head, std::int64_t t, const AttentionShape& shape,
                             const Quarter<dim>& share, float factor) {
  if (t >= shape.sequence) return;
  float* const row = head.data + t * head.stride;
  for (int p = 0; p < Tiling<dim>::own_pieces; ++p) {
    for (int i = 0; i < 4; ++i) {
      const int d = dimension_of(p) + i;
      if (d < shape.head_dim) row[d] = share.piece[p].x[i] * factor;
    }
  }
}

/// Calls f with the smallest sizes that hold `head_dim`.
template <class F>
void with_tiling(std::int64_t head_dim, const F& f) {
  if (head_dim <= 64) return f(Tiling<64>{});
  if (head_dim <= 128) return f(Tiling<128>{});
  return f(Tiling<most_head_dim>{});
}

}  // namespace tandem::gpu
