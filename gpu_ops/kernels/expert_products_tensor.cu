// Products of experts on tensor cores: a block of four warps for each 128 x 128 tile of a result, 64 x 64 of it for
// each warp. Both factors pass through shared memory in steps of 32 terms of the sums, several of which are on their
// way while one is multiplied.
#include <type_traits>

#include "gpu_ops/base/launch.hpp"
#include "gpu_ops/kernels/elements.hpp"
#include "gpu_ops/kernels/expert_tiles.hpp"

namespace tandem::gpu {
namespace {

constexpr int tile = 128;
constexpr int depth = 32;
/// Two blocks have room on a multiprocessor of 100 KiB, compute capability 8.6, where one alone would have four warps.
constexpr int stages = 3;
constexpr int threads = 128;
constexpr int factor_elements = tile * depth;
constexpr std::size_t shared_bytes = std::size_t{stages} * 2 * factor_elements * sizeof(bf16);
/// Packets of a factor that a thread copies in each step.
constexpr int copies = factor_elements / packet / threads;

/// A warp has 64 columns side by side, and every other 16 rows, so that of a tile with few rows all warps have some.
constexpr int row_groups = 4;
constexpr int group_rows = 16;
constexpr int warp_rows = row_groups * group_rows;
constexpr int warp_columns = 64;
constexpr int warps_across = tile / warp_columns;
constexpr int warps_down = tile / warp_rows;
/// Floats of a row of a warp's sums in shared memory: quads that write at once, of four rows, do so to different banks.
constexpr int pitch = warp_columns + packet;
/// Groups of rows that a warp has room for there at once.
constexpr int written_groups = 2;
static_assert(threads / warp_lanes * written_groups * group_rows * pitch * sizeof(float) <= shared_bytes);

/// First column of the warp, and first row of the `group`-th of its groups, in the tile.
TANDEM_DEVICE int warp_column() { return thread_index() / warp_lanes % warps_across * warp_columns; }
TANDEM_DEVICE int group_row(int group) {
  return (group * warps_down + thread_index() / warp_lanes / warps_across) * group_rows;
}

// -- factors in shared memory --------------------------------------------------------------------------------------

/// Elements [at, at + packet) of a row of `end` elements; zeros behind it, or where the row is `missing`. `aligned`:
/// packets are whole and aligned.
template <bool aligned>
TANDEM_DEVICE void copy_packet(bf16* to, const bf16* row, bool missing, std::int64_t at, std::int64_t end) {
  if constexpr (aligned) return start_copy_or_zeros(to, row + at, !missing && at < end);
  store_words(to, !missing && at < end ? load_raw(row, span_at(at, end, false)).part[0] : Words{});
}

/// A factor whose rows in memory are those of the tile: [tile][depth] in shared memory. The thread's are the same in
/// each step.
template <bool aligned>
struct RowsAlong {
  static constexpr bool across = false;
  static constexpr int packets = depth / packet;
  const bf16* rows[copies];
  int count;         ///< rows that there are, of the tile: one or more
  std::int64_t end;  ///< end of the terms

  TANDEM_DEVICE static int row(int i) { return (thread_index() + i * threads) / packets; }

  /// `row_at(r)`: row r of the tile.
  template <class RowAt>
  TANDEM_DEVICE RowsAlong(std::int64_t row_count, std::int64_t terms, const RowAt& row_at)
      : count(row_count < tile ? static_cast<int>(row_count) : tile), end(terms) {
    TANDEM_UNROLL
    for (int i = 0; i < copies; ++i) rows[i] = row_at(row(i) < count ? row(i) : 0);
  }

  TANDEM_DEVICE std::uint32_t look_up(int) const { return 0; }
  TANDEM_DEVICE std::uint32_t place(std::uint32_t) const { return 0; }
  TANDEM_DEVICE void copy(int k, std::uint32_t, bf16* to) const {
    const int at = thread_index() % packets * packet;
    TANDEM_UNROLL
    for (int i = 0; i < copies; ++i) {
      copy_packet<aligned>(to + tile_offset(depth, row(i), at), rows[i], row(i) >= count, k + at, end);
    }
  }
};

/// A factor that has a row in memory for each of the `terms` of the sums, in order from `begin` on, of which the tile
/// takes a part from `first` on: [depth][tile]. Rows may lie anywhere.
template <bool aligned>
struct RowsAcross {
  static constexpr bool across = true;
  static constexpr int packets = tile / packet;
  static_assert(depth == warp_lanes, "a warp looks up the rows of a step at once");
  RowSource<bf16> source;
  std::int64_t begin;
  int terms;
  std::int64_t first, row_end;  ///< row_end: elements of a row

  /// Place of the row of term k + l, in lane l, in the two parts of RowSource: the first is asked for long before the
  /// row is copied, the second when the first has come.
  TANDEM_DEVICE std::uint32_t look_up(int k) const {
    const int term = k + own_lane();
    return term < terms ? source.look_up(begin + term) : 0;
  }
  TANDEM_DEVICE std::uint32_t place(std::uint32_t found) const { return source.place(found); }
  TANDEM_DEVICE void copy(int k, std::uint32_t places, bf16* to) const {
    const int at = thread_index() % packets * packet;
    TANDEM_UNROLL
    for (int i = 0; i < copies; ++i) {
      const int r = (thread_index() + i * threads) / packets;
      const bf16* const row = source.at_place(value_of_lane(places, r));
      copy_packet<aligned>(to + tile_offset(tile, r, at), row, k + r >= terms, first + at, row_end);
    }
  }
};

/// Rows [row, row + 16) of a left factor, terms [k, k + 16).
template <bool across>
TANDEM_DEVICE Words left_factor(bf16* factor, int row, int k) {
  const int lane = own_lane();
  if constexpr (across) {
    return load_transposed(factor + tile_offset(tile, k + lane / 16 * 8 + lane % 8, row + lane / 8 % 2 * 8));
  } else {
    return load_matrices(factor + tile_offset(depth, row + lane % 16, k + lane / 16 * 8));
  }
}

/// Columns [column, column + 8) of a right factor and the eight after them, terms [k, k + 16).
template <bool across>
TANDEM_DEVICE Words right_factors(bf16* factor, int column, int k) {
  const int lane = own_lane();
  if constexpr (across) {
    return load_transposed(factor + tile_offset(tile, k + lane % 16, column + lane / 16 * 8));
  } else {
    return load_matrices(factor + tile_offset(depth, column + lane / 16 * 8 + lane % 8, k + lane / 8 % 2 * 8));
  }
}

// -- sums ----------------------------------------------------------------------------------------------------------

/// A warp's part of a tile.
struct Sums {
  ProductPart at[row_groups][warp_columns / 8];
};

/// The first `groups` of the warp's groups of rows have sums.
template <bool left_across, bool right_across>
TANDEM_DEVICE void multiply(Sums& sums, int groups, bf16* left, bf16* right) {
  TANDEM_UNROLL
  for (int k = 0; k < depth; k += 16) {
    Words rows[row_groups], columns[warp_columns / 16];
    TANDEM_UNROLL
    for (int i = 0; i < row_groups; ++i) rows[i] = left_factor<left_across>(left, group_row(i), k);
    TANDEM_UNROLL
    for (int j = 0; j < warp_columns / 16; ++j) {
      columns[j] = right_factors<right_across>(right, warp_column() + j * 16, k);
    }
    TANDEM_UNROLL
    for (int i = 0; i < row_groups; ++i) {
      if (i >= groups) continue;
      TANDEM_UNROLL
      for (int j = 0; j < warp_columns / 16; ++j) {
        multiply_add(sums.at[i][2 * j], rows[i], columns[j].word[0], columns[j].word[1]);
        multiply_add(sums.at[i][2 * j + 1], rows[i], columns[j].word[2], columns[j].word[3]);
      }
    }
  }
}

/// One number for each factor: the result of look_up() in a step, or the place of its rows.
struct OfBoth {
  std::uint32_t left, right;
};

/// Sums over `terms` of the products of both factors, by all threads of the block; `memory` is free again when it
/// returns.
template <class Left, class Right>
TANDEM_DEVICE Sums products(const Left& left, const Right& right, int terms, int groups, bf16* memory) {
  Sums sums = {};
  const int steps = (terms + depth - 1) / depth;
  const auto look_up = [&](int step) { return OfBoth{left.look_up(step * depth), right.look_up(step * depth)}; };
  const auto places = [&](OfBoth found) { return OfBoth{left.place(found.left), right.place(found.right)}; };
  const auto copy = [&](int step, int stage, OfBoth from) {
    bf16* const to = memory + stage * 2 * factor_elements;
    if (step < steps) {
      left.copy(step * depth, from.left, to);
      right.copy(step * depth, from.right, to + factor_elements);
    }
    close_copies();
  };
  OfBoth found[stages];
  TANDEM_UNROLL
  for (int step = 0; step < stages; ++step) found[step] = look_up(step);
  TANDEM_UNROLL
  for (int step = 0; step < stages - 1; ++step) copy(step, step, places(found[step]));
  OfBoth upcoming = places(found[stages - 1]);
  int now = 0, next = stages - 1;
  for (int step = 0; step < steps; ++step) {
    await_copies<stages - 2>();
    barrier();
    copy(step + stages - 1, next, upcoming);
    const OfBoth after = look_up(step + stages);
    bf16* const from = memory + now * 2 * factor_elements;
    if (groups > 0) multiply<Left::across, Right::across>(sums, groups, from, from + factor_elements);
    upcoming = places(after);
    now = now + 1 == stages ? 0 : now + 1;
    next = next + 1 == stages ? 0 : next + 1;
  }
  barrier();
  return sums;
}

/// Part of a result that a tile covers.
template <class C>
struct Target {
  C* data;  ///< the tile's first element
  std::int64_t stride;
  std::int64_t rows, columns;  ///< from there on, of the tile and beyond

  /// Groups of the warp's rows that have any of these.
  TANDEM_DEVICE int groups() const {
    if (warp_column() >= columns) return 0;
    int count = 0;
    while (count < row_groups && group_row(count) < rows) ++count;
    return count;
  }
};

/// Groups of the warp's rows from `first` on, into its room in shared memory.
TANDEM_DEVICE void put(const Sums& sums, int first, float* own) {
  TANDEM_UNROLL
  for (int i = 0; i < written_groups; ++i) {
    TANDEM_UNROLL
    for (int j = 0; j < warp_columns / 8; ++j) {
      const ProductPart& part = sums.at[first + i][j];
      float* const to = own + (i * group_rows + own_lane() / 4) * pitch + j * 8 + own_lane() % 4 * 2;
      store_two_words(to, {{numerics::float_bits(part.x[0]), numerics::float_bits(part.x[1])}});
      store_two_words(to + 8 * pitch, {{numerics::float_bits(part.x[2]), numerics::float_bits(part.x[3])}});
    }
  }
}

/// Writes what put() has left there to the result, or adds it to what is there.
template <class C>
TANDEM_DEVICE void take(const Target<C>& target, int first, bool add, bool aligned, const float* own) {
  constexpr int packets = warp_columns / packet;
  const int at = own_lane() % packets * packet, column = warp_column() + at;
  if (column >= target.columns) return;
  const Span span = span_at(column, target.columns, aligned);
  for (int r = own_lane() / packets; r < written_groups * group_rows; r += warp_lanes / packets) {
    const int row = group_row(first + r / group_rows) + r % group_rows;
    if (row >= target.rows) return;
    C* const to = target.data + row * target.stride;
    Floats sum = wide_load(own + r * pitch + at);
    if (add) {
      const Floats before = load(to, span);
      for (int k = 0; k < packet; ++k) sum.x[k] = before.x[k] + sum.x[k];
    }
    store(to, span, sum);
  }
}

/// Writes the warp's sums, or adds them, through its part of `room`.
template <class C>
TANDEM_DEVICE void write(const Target<C>& target, const Sums& sums, bool add, bool aligned, float* room) {
  float* const own = room + thread_index() / warp_lanes * written_groups * group_rows * pitch;
  TANDEM_UNROLL
  for (int first = 0; first < row_groups; first += written_groups) {
    if (first > 0) warp_barrier();
    put(sums, first, own);
    warp_barrier();
    take(target, first, add, aligned, own);
  }
}

// -- kernels -------------------------------------------------------------------------------------------------------

/// Neighbouring blocks have the same rows, and then the next ones of the same expert.
template <bool across, bool aligned>
TANDEM_KERNEL(threads)
tensor_expert_product_kernel(RowProduct<bf16> p) {
  TANDEM_DYNAMIC_SHARED(bf16, memory);
  const int terms = static_cast<int>(p.k);
  const std::int64_t columns = ceil_div(p.n, tile), tiles = most_expert_tiles(p.rows, p.experts, tile) * columns;
  for (std::int64_t index = block_index(); index < tiles; index += grid_size()) {
    const ExpertTile rows = find_tile(p.begins, p.experts, index / columns, tile);
    if (rows.expert < 0) return;  // nor are there later ones
    const std::int64_t count = rows.end - rows.first, first = index % columns * tile;
    const bf16* const w = p.w + rows.expert * p.n * p.k;
    const Target<bf16> y{p.y + rows.first * p.n + first, p.n, count, p.n - first};
    const int groups = y.groups();
    const RowsAlong<aligned> x(count, p.k, [&](int r) { return p.x.row(rows.first + r); });
    Sums sums;
    if constexpr (across) {
      const RowsAcross<aligned> of_w{{w, p.n, nullptr, {}}, 0, terms, first, p.n};
      sums = products(x, of_w, terms, groups, memory);
    } else {
      const RowsAlong<aligned> of_w(p.n - first, p.k, [&](int r) { return w + (first + r) * p.k; });
      sums = products(x, of_w, terms, groups, memory);
    }
    if (groups > 0) write(y, sums, p.accumulate, aligned, reinterpret_cast<float*>(memory));
    barrier();
  }
}

template <class W, bool aligned>
TANDEM_KERNEL(threads)
tensor_expert_weight_product_kernel(WeightProduct<bf16, W> p) {
  TANDEM_DYNAMIC_SHARED(bf16, memory);
  constexpr bool adds = std::is_same_v<W, float>;
  const std::int64_t columns = ceil_div(p.n, tile), of_expert = columns * ceil_div(p.m, tile);
  for (std::int64_t index = block_index(); index < p.experts * of_expert; index += grid_size()) {
    const std::int64_t expert = index / of_expert;
    const std::int32_t begin = p.begins[expert], count = p.begins[expert + 1] - begin;
    if (adds && count == 0) continue;
    const std::int64_t first_row = index % of_expert / columns * tile, first_column = index % columns * tile;
    const Target<W> dw{p.dw + (expert * p.m + first_row) * p.n + first_column, p.n, p.m - first_row,
                       p.n - first_column};
    const int groups = dw.groups();
    const RowsAcross<aligned> dy{p.dy, begin, count, first_row, p.m}, x{p.x, begin, count, first_column, p.n};
    const Sums sums = products(dy, x, count, groups, memory);
    if (groups > 0) write(dw, sums, adds, aligned, reinterpret_cast<float*>(memory));
    barrier();
  }
}

/// Calls f<aligned>().
template <class F>
void with_alignment(bool aligned, const F& f) {
  if (aligned) return f.template operator()<true>();
  f.template operator()<false>();
}

template <class W>
void weight_product(const WeightProduct<bf16, W>& p, CUstream_st* stream) {
  const std::int64_t tiles = p.experts * ceil_div(p.m, tile) * ceil_div(p.n, tile);
  const bool whole = whole_packets<bf16>(p.m) && whole_packets<bf16>(p.n);
  with_alignment(whole && aligned(p.dy.data, p.x.data, p.dw), [&]<bool aligned>() {
    launch("expert_weight_product", tensor_expert_weight_product_kernel<W, aligned>,
           Geometry{blocks_for(tiles, 1), threads, shared_bytes}, stream, p);
  });
}

}  // namespace

void tensor_expert_product(const RowProduct<bf16>& p, CUstream_st* stream) {
  const std::int64_t tiles = most_expert_tiles(p.rows, p.experts, tile) * ceil_div(p.n, tile);
  const Geometry geometry{blocks_for(tiles, 1), threads, shared_bytes};
  const bool whole = whole_packets<bf16>(p.k) && whole_packets<bf16>(p.n);
  with_alignment(whole && aligned(p.x.data, p.w, p.y), [&]<bool aligned>() {
    if (p.across) {
      launch("expert_product", tensor_expert_product_kernel<true, aligned>, geometry, stream, p);
    } else {
      launch("expert_product", tensor_expert_product_kernel<false, aligned>, geometry, stream, p);
    }
  });
}

void tensor_expert_weight_product(const WeightProduct<bf16, float>& p, CUstream_st* stream) {
  weight_product(p, stream);
}
void tensor_expert_weight_product(const WeightProduct<bf16, bf16>& p, CUstream_st* stream) {
  weight_product(p, stream);
}

}  // namespace tandem::gpu
