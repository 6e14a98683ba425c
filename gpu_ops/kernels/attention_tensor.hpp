#pragma once
// Shared parts of the attention kernels on tensor cores. Four warps own a tile of 64 rows of a head, 16 rows each: as
// the left factor of products, whose right factors are tiles of bf16 that pass through shared memory. A product of 16
// rows with 8 columns lies in the registers of a warp (ProductPart), a quad having two rows of it. For heads wider than
// 128 a thread's registers hold only one sum of a row's products: the other data of own rows stays in shared memory.
#include <kernel_language.hpp>

#include "gpu_ops/kernels/attention_operands.hpp"

namespace tandem::gpu {

/// Sizes for heads of up to `dim` dimensions.
template <int dim>
struct TensorTiling {
  static constexpr int dimensions = dim;
  static constexpr int warp_rows = 16;
  static constexpr int warps = 4;
  static constexpr int threads = warps * warp_lanes;
  static constexpr int rows = warps * warp_rows;
  static constexpr int blocks = dim <= 64 ? 3 : 1;  ///< blocks that a multiprocessor's registers have to hold
  static constexpr bool wide = dim > 128;           ///< wider than the registers have room for
  static constexpr int buffers = wide ? 1 : 2;      ///< buffers for each operand that passes through shared memory
  static constexpr int packets = dim / packet;  ///< packets of a row; also the products along it, eight columns each
  static constexpr int steps = dim / 16;        ///< steps of a product over the dimensions
  /// Unrolled steps of products whose left factors are in shared memory.
  static constexpr int unrolled = wide ? 4 : steps;
};

/// The 16 rows of a warp times `columns` columns.
template <int columns>
struct Products {
  ProductPart at[columns / 8];
};

// -- where a lane's elements lie -----------------------------------------------------------------------------------

/// First row of the tile that is this warp's; warps behind the first four share those of these.
TANDEM_DEVICE int warp_row() { return thread_index() / warp_lanes % 4 * 16; }
/// Row of the tile of elements 0 and 1 (`half` 0) and 2 and 3 (1) of this thread's products.
TANDEM_DEVICE int own_row(int half) { return warp_row() + own_lane() / quad + half * 8; }
/// Column of element `e` of product j.
TANDEM_DEVICE int own_column(int j, int e) { return j * 8 + own_lane() % quad * 2 + e % 2; }

/// Positions that this warp's rows of a tile see, and each of this thread's two.
struct OwnSeen {
  SeenByRange warp;
  Seen row[2];
};
/// `seen(t)`: what the token at position t sees; `first`: position of the tile's first row.
template <class SeenBy>
TANDEM_DEVICE OwnSeen own_seen(std::int64_t first, const SeenBy& seen) {
  return {{seen(first + warp_row()), seen(first + warp_row() + 15)},
          {seen(first + own_row(0)), seen(first + own_row(1))}};
}

// -- weights -------------------------------------------------------------------------------------------------------

/// Weights are powers of two, which is what the hardware computes: e^x = 2^(x log2 e).
constexpr std::uint32_t log2_e = 0x3fb8aa3bu;
TANDEM_DEVICE float in_powers_of_two(float x) { return x * numerics::bits_float(log2_e); }

/// The scale of scores, in powers of two: its sign belongs to the products, so that the largest of them has the largest
/// score, and zero is the smallest number, so that -inf stays what it is.
struct ScoreScale {
  float magnitude;
  bool negative;
};
TANDEM_DEVICE ScoreScale score_scale(float scale) {
  return {std::fmax(std::fabs(in_powers_of_two(scale)), numerics::bits_float(smallest_normal)), scale < 0.0F};
}

/// Gives products with tokens from position `first` on the sign of the scale, and those that are not seen -inf.
template <int columns>
TANDEM_DEVICE void sign_and_hide(Products<columns>& products, bool negative, const OwnSeen& seen, int first) {
  if (!negative && sees_all(seen.warp, {first, first + columns - 1})) return;
  TANDEM_UNROLL
  for (int j = 0; j < columns / 8; ++j) {
    for (int e = 0; e < 4; ++e) {
      float& x = products.at[j].x[e];
      x = negative ? -x : x;
      if (!sees(seen.row[e / 2], first + own_column(j, e))) x = numerics::bits_float(minus_infinity);
    }
  }
}

/// Weight of a key that a query sees, or does not where the product is -inf; `lse` is that of powers of two.
TANDEM_DEVICE float power_of(float product, float lse, const ScoreScale& scale) {
  return exp2_estimate(numerics::fma(scale.magnitude, product, -lse));
}

/// Gradient of a score from its weight and the weight's gradient, before the factor `scale`: sums over them are
/// multiplied by it when they are written.
TANDEM_DEVICE float unscaled_dscore(float weight, float dweight, float delta) { return weight * (dweight - delta); }

// -- tiles in shared memory ----------------------------------------------------------------------------------------

/// Element `at` of a row of a tile.
template <int dim>
TANDEM_DEVICE bf16* tile_at(bf16* tile, int row, int at) {
  return tile + tile_offset(dim, row, at);
}

/// Packets of a tile that this thread copies there: the same ones of each `at_once` rows, from `row` on.
template <int dim, int threads>
struct OwnPackets {
  static constexpr int at_once = threads / TensorTiling<dim>::packets;
  int row = thread_index() / TensorTiling<dim>::packets;
  int at = thread_index() % TensorTiling<dim>::packets * packet;

  TANDEM_DEVICE const bf16* in(const Head<bf16>& head, std::int64_t first) const {
    return head.data + (first + row) * head.stride + at;
  }
  /// Copies them; all are on their way when this returns.
  TANDEM_DEVICE void copy(const Head<bf16>& head, std::int64_t first, int rows, bf16* tile) const {
    const bf16* from = in(head, first);
    bf16* const to = tile_at<dim>(tile, row, at);
    TANDEM_UNROLL
    for (int i = 0; i < rows; i += at_once, from += at_once * head.stride) {
      start_copy(at_once % packet == 0 ? to + i * dim : tile_at<dim>(tile, row + i, at), from);
    }
  }
  /// The first `count` elements of those of the first `there` rows, and zeros.
  TANDEM_DEVICE void copy_some(const Head<bf16>& head, std::int64_t first, int rows, int there, int count, bool aligned,
                               bf16* tile) const {
    const bf16* from = in(head, first);
    TANDEM_UNROLL_BY(1)
    for (int i = row; i < rows; i += at_once, from += at_once * head.stride) {
      bf16* const to = tile_at<dim>(tile, i, at);
      if (aligned && i < there) {
        start_copy(to, from);
      } else {
        store_words(to, load_raw(from, {0, i < there ? count : 0, false}).part[0]);
      }
    }
  }
};

/// Rows [first, first + rows) of heads, each to a tile; zeros behind the last token and the last dimension. They are
/// there after staged(): what is copied whole is on its way until then, all of a thread's packets at once.
template <int dim, int threads, int heads>
TANDEM_DEVICE void stage_heads(const Head<bf16> (&from)[heads], std::int64_t first, int rows,
                               const AttentionShape& shape, bool aligned, bf16* const (&tiles)[heads]) {
  const OwnPackets<dim, threads> own;
  const std::int64_t left = shape.sequence - first;
  const int there = own.at >= shape.head_dim ? 0 : left < rows ? static_cast<int>(left) : rows;
  if (aligned && there == rows) {
    TANDEM_UNROLL
    for (int i = 0; i < heads; ++i) own.copy(from[i], first, rows, tiles[i]);
  } else {
    const int count = span_at(own.at, shape.head_dim, false).count;
    TANDEM_UNROLL
    for (int i = 0; i < heads; ++i) own.copy_some(from[i], first, rows, there, count, aligned, tiles[i]);
  }
}
template <int dim, int threads = TensorTiling<dim>::threads>
TANDEM_DEVICE void stage(const Head<bf16>& head, std::int64_t first, int rows, const AttentionShape& shape,
                         bool aligned, bf16* tile) {
  stage_heads<dim, threads, 1>({head}, first, rows, shape, aligned, {tile});
}
/// All threads see what the block has staged.
TANDEM_DEVICE void staged() {
  close_copies();
  await_copies<0>();
  barrier();
}

/// Uses tiles [0, count) one after another. `copy(i, buffer)` begins to stage tile i, and `use(i, buffer)` takes what
/// is there. With two buffers a tile is on its way while the one before it is used, and the first one already when this
/// is called; of the result, a buffer, no warp needs anything.
template <int buffers, class Copy, class Use>
TANDEM_DEVICE int for_tiles(int count, const Copy& copy, const Use& use) {
  int now = 0;
  for (int i = 0; i < count; ++i) {
    if (buffers == 1) copy(i, 0);
    staged();  // and no warp needs the other buffer
    if (buffers > 1 && i + 1 < count) copy(i + 1, 1 - now);
    use(i, now);
    if (buffers == 1) barrier();
    if (buffers > 1) now = 1 - now;
  }
  return now;
}
/// Tiles of `rows` that [first, end) takes.
TANDEM_DEVICE int tiles_between(std::int64_t first, std::int64_t end, int rows) {
  return static_cast<int>(ceil_div(end - first, rows));
}

/// Two heads, or two operands of one, that are needed side by side.
struct HeadPair {
  Head<bf16> a, b;
};
TANDEM_DEVICE HeadPair pair_at(const HeadsView& a, const HeadsView& b, const AttentionShape& shape, std::int64_t batch,
                               std::int64_t head) {
  return {head_at<bf16>(a, shape, batch, head), head_at<bf16>(b, shape, batch, head)};
}
template <int dim, int threads = TensorTiling<dim>::threads>
TANDEM_DEVICE void stage(const HeadPair& heads, std::int64_t first, int rows, const AttentionShape& shape, bool aligned,
                         bf16* of_a, bf16* of_b) {
  stage_heads<dim, threads, 2>({heads.a, heads.b}, first, rows, shape, aligned, {of_a, of_b});
}

/// Places in which a lane reads the rows of a tile that it names to the others: one of the first 16, and in every 16
/// dimensions the packet from `at` on, 0 or 8. Rows that are a multiple of eight further on lie in the same way
/// (tile_offset), so that the lane's part of an address is computed once.
template <int dim>
class LanePackets {
 public:
  TANDEM_DEVICE LanePackets(bf16* tile, int row, int at)
      : row_(tile + row * dim), swapped_(tile_offset(dim, row, at) - row * dim) {}
  /// `rows`, a multiple of eight, further on, of dimensions [at, at + 16).
  TANDEM_DEVICE const bf16* operator()(int rows, int at) const { return row_ + (swapped_ ^ at) + rows * dim; }

 private:
  const bf16* row_;
  int swapped_;
};

/// This warp's rows of a tile as left factors: a matrix of eight rows beside, and below, another.
template <int dim>
TANDEM_DEVICE LanePackets<dim> left_packets(bf16* tile) {
  return {tile + warp_row() * dim, own_lane() % 16, own_lane() / 16 * 8};
}
/// Rows of a tile as right factors of products over the dimensions: two with 16 of the rows, one with each eight.
template <int dim>
TANDEM_DEVICE LanePackets<dim> packets_of_rows(bf16* tile) {
  return {tile, own_lane() / 16 * 8 + own_lane() % 8, own_lane() / 8 % 2 * 8};
}
/// Rows of a tile as right factors of sums over 16 of them: two products with 16 of the dimensions, one with each
/// eight.
template <int dim>
TANDEM_DEVICE LanePackets<dim> packets_of_columns(bf16* tile) {
  return {tile, own_lane() % 16, own_lane() / 16 * 8};
}

/// The left factors of a product over all dimensions, in registers.
template <int dim>
struct Rows {
  Words step[TensorTiling<dim>::steps];
};
template <int dim>
TANDEM_DEVICE Rows<dim> own_rows(bf16* tile) {
  const LanePackets<dim> packets = left_packets<dim>(tile);
  Rows<dim> rows;
  TANDEM_UNROLL
  for (int i = 0; i < TensorTiling<dim>::steps; ++i) rows.step[i] = load_matrices(packets(0, i * 16));
  return rows;
}

/// This warp's rows as left factors: in registers, when the tile is staged; or those of wide heads, for which there is
/// no room, as they will lie in the tile.
template <int dim>
TANDEM_DEVICE auto own_factors(bf16* tile) {
  if constexpr (TensorTiling<dim>::wide) {
    return tile;
  } else {
    return own_rows<dim>(tile);
  }
}

// -- products ------------------------------------------------------------------------------------------------------

TANDEM_DEVICE void multiply_add_two(ProductPart& first, ProductPart& second, const Words& left, const Words& right) {
  multiply_add(first, left, right.word[0], right.word[1]);
  multiply_add(second, left, right.word[2], right.word[3]);
}

/// Adds products over dimensions [at, at + 16): `left`, rows of this warp, times `others` from `first` on.
template <int dim, int columns>
TANDEM_DEVICE void add_products(Products<columns>& products, const Words& left, const LanePackets<dim>& others,
                                int first, int at) {
  TANDEM_UNROLL
  for (int j = 0; j < columns / 8; j += 2) {
    multiply_add_two(products.at[j], products.at[j + 1], left, load_matrices(others(first + j * 8, at)));
  }
}

/// Products of this warp's rows with `columns` rows of a tile from `first` on, a multiple of eight.
template <int columns, int dim>
TANDEM_DEVICE Products<columns> with_rows(const Rows<dim>& own, bf16* tile, int first) {
  const LanePackets<dim> others = packets_of_rows<dim>(tile);
  Products<columns> products = {};
  TANDEM_UNROLL
  for (int step = 0; step < TensorTiling<dim>::steps; ++step) {
    add_products(products, own.step[step], others, first, step * 16);
  }
  return products;
}
/// Products of a warp's rows, kept in a tile of their own, with `columns` rows of another tile from `first` on.
template <int columns, int dim>
TANDEM_DEVICE Products<columns> with_rows(bf16* own, bf16* tile, int first) {
  const LanePackets<dim> rows = left_packets<dim>(own), others = packets_of_rows<dim>(tile);
  Products<columns> products = {};
  TANDEM_UNROLL_BY(TensorTiling<dim>::unrolled)
  for (int step = 0; step < TensorTiling<dim>::steps; ++step) {
    add_products(products, load_matrices(rows(0, step * 16)), others, first, step * 16);
  }
  return products;
}

/// sums += weights, rounded to bf16, times `columns` rows of a tile from `first` on.
template <int dim, int columns>
TANDEM_DEVICE void add_weighted(Products<dim>& sums, const Products<columns>& weights, bf16* tile, int first) {
  const LanePackets<dim> others = packets_of_columns<dim>(tile);
  TANDEM_UNROLL
  for (int step = 0; step < columns / 16; ++step) {
    const ProductPart &a = weights.at[2 * step], &b = weights.at[2 * step + 1];
    const Words left = {
        {bf16_pair(a.x[0], a.x[1]), bf16_pair(a.x[2], a.x[3]), bf16_pair(b.x[0], b.x[1]), bf16_pair(b.x[2], b.x[3])}};
    TANDEM_UNROLL
    for (int j = 0; j < dim / 8; j += 2) {
      multiply_add_two(sums.at[j], sums.at[j + 1], left, load_transposed(others(first + step * 16, j * 8)));
    }
  }
}

/// Writes this warp's rows of the tile from row `first` of a head on, times a factor of each row: through the same rows
/// of a tile that nobody needs any more.
template <int dim>
TANDEM_DEVICE void write_own_rows(const Head<bf16>& head, std::int64_t first, const AttentionShape& shape, bool aligned,
                                  const Products<dim>& sums, const float (&factor)[2], bf16* tile) {
  using Size = TensorTiling<dim>;
  TANDEM_UNROLL
  for (int j = 0; j < Size::packets; ++j) {
    TANDEM_UNROLL
    for (int half = 0; half < 2; ++half) {
      const float* const pair = sums.at[j].x + 2 * half;
      store_word(tile_at<dim>(tile, own_row(half), j * 8) + own_column(0, 0),
                 bf16_pair(pair[0] * factor[half], pair[1] * factor[half]));
    }
  }
  warp_barrier();
  for (int i = own_lane(); i < Size::warp_rows * Size::packets; i += warp_lanes) {
    const int row = warp_row() + i / Size::packets, at = i % Size::packets * packet;
    if (first + row >= shape.sequence || at >= shape.head_dim) continue;
    bf16* const to = head.data + (first + row) * head.stride;
    const Span span = span_at(at, shape.head_dim, aligned);
    store_raw(to, span, wide_load_raw<bf16>(tile_at<dim>(tile, row, at)));
  }
}

/// Calls f with the smallest sizes that hold `head_dim`.
template <class F>
void with_tensor_tiling(std::int64_t head_dim, const F& f) {
  if (head_dim <= 64) return f(TensorTiling<64>{});
  if (head_dim <= 128) return f(TensorTiling<128>{});
  return f(TensorTiling<most_head_dim>{});
}

}  // namespace tandem::gpu
