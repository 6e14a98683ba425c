#pragma once
// Shared parts of all attention kernels: operands, statistics of rows, and how the tiles of a call are handed out. A
// block owns a tile of rows of one head; four neighbouring threads, a quad, own the same rows of it.
#include <algorithm>
#include <cmath>
#include <kernel_language.hpp>

#include "core/numerics/functions.hpp"
#include "core/ops/ops.hpp"
#include "gpu_ops/base/attention.hpp"
#include "gpu_ops/base/geometry.hpp"
#include "gpu_ops/kernels/elements.hpp"

namespace tandem::gpu {

constexpr int quad = 4;
constexpr std::uint32_t minus_infinity = 0xff800000u;
constexpr std::uint32_t smallest_normal = 0x00800000u;
/// Below every score, and a number, so that -inf less this is -inf too: a row may see no key of its first tile.
constexpr std::uint32_t lowest = 0xff7fffffu;

struct ForwardOperands {
  HeadsView q, k, v, out;
  float* lse;          ///< (B, H, T), or null
  std::int64_t reach;  ///< AttentionShape::reach(), which a kernel that makes it itself keeps in registers
};

struct BackwardOperands {
  HeadsView dout, q, k, v, out, dq, dk, dv;
  const float* lse;  ///< (B, H, T)
  float* delta;      ///< (B, H, T): dout . out of each row
  std::int64_t reach;
};

/// One head of one batch entry, (T, D).
template <class T>
struct Head {
  T* data;
  std::int64_t stride;
};

template <class T>
TANDEM_DEVICE Head<T> head_at(const HeadsView& view, const AttentionShape& s, std::int64_t b, std::int64_t h) {
  return {static_cast<T*>(view.data) + b * s.sequence * view.row_stride + h * s.head_dim, view.row_stride};
}

TANDEM_DEVICE float quad_max(float value) {
  for (int distance = 1; distance < quad; distance *= 2) value = std::fmax(value, shuffle_xor(value, distance));
  return value;
}

TANDEM_DEVICE float quad_sum(float value) {
  for (int distance = 1; distance < quad; distance *= 2) value = value + shuffle_xor(value, distance);
  return value;
}

/// The statistic that backward starts from, of a row whose weights are relative to exp(largest).
TANDEM_DEVICE float log_of_sum(float largest, float sum) {
  return static_cast<float>(static_cast<double>(largest) + std::log(static_cast<double>(sum)));
}

/// Weight of a key that a query sees, in backward, and the gradient of their score.
TANDEM_DEVICE float weight_of(float product, float lse, float scale) {
  return numerics::exp(numerics::fma(scale, product, -lse));
}
TANDEM_DEVICE float dscore_of(float weight, float dweight, float delta, float scale) {
  return weight * (dweight - delta) * scale;
}

/// A block's tile among those of all heads.
struct TileOf {
  std::int64_t first;  ///< row
  std::int64_t b, h;
};
/// Tile of queries, the longest rows first, so that the last blocks to run are short ones.
TANDEM_DEVICE TileOf queries_of(std::int64_t i, int rows, const AttentionShape& shape) {
  const std::int64_t tiles = ceil_div(shape.sequence, rows), heads = shape.batch * shape.heads;
  return {(tiles - 1 - i / heads) * rows, i % heads / shape.heads, i % shape.heads};
}
/// Tile of keys, the first ones first, which most queries see.
TANDEM_DEVICE TileOf keys_of(std::int64_t i, int rows, const AttentionShape& shape) {
  const std::int64_t heads = shape.batch * shape.kv_heads;
  return {i / heads * rows, i % heads / shape.kv_heads, i % shape.kv_heads};
}

/// Rows of a tile, both ends among them.
struct RowRange {
  int first, last;
};

/// Positions [first, end) of the tokens that one token sees, or that see it.
struct Seen {
  int first, end;
};
TANDEM_DEVICE bool sees(const Seen& seen, int position) { return position >= seen.first && position < seen.end; }

/// Index of token t of row b among all; of the last where it lies behind that.
TANDEM_DEVICE std::int64_t token_at(std::int64_t b, std::int64_t t, const AttentionShape& shape) {
  return b * shape.sequence + (t < shape.sequence ? t : shape.sequence - 1);
}
/// Keys that query t of row b sees.
TANDEM_DEVICE Seen keys_seen(std::int64_t b, std::int64_t t, const AttentionShape& shape, std::int64_t reach) {
  const std::int64_t first = t + 1 - reach;
  const std::int64_t record = shape.records ? shape.records.first[token_at(b, t, shape)] : 0;
  return {static_cast<int>(first > record ? first : record), static_cast<int>(t + 1)};
}
/// Queries that see key t of row b; they may reach beyond the row's last token.
TANDEM_DEVICE Seen queries_seen(std::int64_t b, std::int64_t t, const AttentionShape& shape, std::int64_t reach) {
  const std::int64_t end = t + reach;
  const std::int64_t record = shape.records ? shape.records.end[token_at(b, t, shape)] : end;
  return {static_cast<int>(t), static_cast<int>(end < record ? end : record)};
}

/// Positions that the rows of a range see, by its first and its last: neither end of what a row sees lies before that
/// of the row before it.
struct SeenByRange {
  Seen first_row, last_row;
};
/// Whether each row sees all positions of `others`.
TANDEM_DEVICE bool sees_all(const SeenByRange& rows, const RowRange& others) {
  return others.first >= rows.last_row.first && others.last < rows.first_row.end;
}
/// Whether any row may see any position of `others`.
TANDEM_DEVICE bool sees_any(const SeenByRange& rows, const RowRange& others) {
  return others.first < rows.last_row.end && others.last >= rows.first_row.first;
}

/// First key, of a whole tile of `rows`, that any of the queries from `first_query` on sees.
TANDEM_DEVICE std::int64_t first_key_of(const TileOf& queries, int rows, const AttentionShape& shape,
                                        std::int64_t reach) {
  return keys_seen(queries.b, queries.first, shape, reach).first / rows * rows;
}
/// End of the keys that any of `rows` queries from `first_query` on sees.
TANDEM_DEVICE std::int64_t end_of_keys(std::int64_t first_query, int rows, std::int64_t sequence) {
  const std::int64_t end = first_query + rows;
  return end < sequence ? end : sequence;
}
/// End of the queries that see any of `rows` keys.
TANDEM_DEVICE std::int64_t end_of_queries(const TileOf& keys, int rows, const AttentionShape& shape,
                                          std::int64_t reach) {
  const std::int64_t end = queries_seen(keys.b, end_of_keys(keys.first, rows, shape.sequence) - 1, shape, reach).end;
  return end < shape.sequence ? end : shape.sequence;
}

// -- on the host ---------------------------------------------------------------------------------------------------

/// Work of one kernel.
struct TileWork {
  std::int64_t heads;  ///< heads of all sequences
  double products;     ///< multiply-adds of a row with another, for each dimension
  std::size_t shared_bytes;
};

/// Calls f with the first tile and the geometry of each launch: blocks of Size::threads, each with one tile of
/// Size::rows rows. With strides of the grid the compiler keeps what the end of a tile needs in registers from its
/// beginning.
template <class Size, class F>
void in_launches(const TileWork& work, const AttentionShape& shape, const AttentionLimits& limits, const F& f) {
  const std::int64_t tiles = ceil_div(shape.sequence, Size::rows) * work.heads;
  // Tiles at both ends of a window are whole ones.
  const std::int64_t met = std::min(shape.sequence, shape.reach() + 2 * Size::rows);
  const double of_largest = work.products * Size::dimensions * Size::rows * static_cast<double>(met);
  const std::int64_t at_once = tiles_at_once(of_largest, limits);
  for (std::int64_t first = 0; first < tiles; first += at_once) {
    f(first, Geometry{std::min(at_once, tiles - first), Size::threads, work.shared_bytes});
  }
}

/// 16-byte accesses to every row of every head.
template <class T, class... View>
bool aligned_heads(std::int64_t head_dim, const View&... views) {
  return whole_packets<T>(head_dim) && ((whole_packets<T>(views.row_stride) && aligned(views.data)) && ...);
}

inline void require_narrow_heads(const AttentionShape& shape) {
  if (shape.head_dim <= most_head_dim) return;
  throw MisuseError("attention: a head dimension above 256", std::to_string(shape.head_dim));
}

/// Attention of bf16 operands on tensor cores (attention_tensor*.cu).
void tensor_attention(const ForwardOperands& operands, const AttentionShape& shape, const AttentionLimits& limits,
                      CUstream_st* stream);
/// Backward on tensor cores, with delta already computed.
void tensor_attention_backward(const BackwardOperands& operands, const AttentionShape& shape,
                               const AttentionLimits& limits, CUstream_st* stream);

}  // namespace tandem::gpu
