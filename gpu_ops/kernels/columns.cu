// Sums over the rows of a matrix: gradients of biases and of the norms' parameters. Rows are cut into parts, a
// function of shapes alone; each part is summed by one block in a fixed order, then the parts in order. So no
// atomics are needed, and no sum depends on how many blocks a card runs at once.
#include "core/memory/memory.hpp"
#include "gpu_ops/base/kernels.hpp"
#include "gpu_ops/base/launch.hpp"
#include "gpu_ops/base/scratch.hpp"
#include "gpu_ops/kernels/block_sums.hpp"
#include "gpu_ops/kernels/elements.hpp"

namespace tandem::gpu {
namespace {

/// Rows of a part at least.
constexpr std::int64_t least_rows = 32;
/// Operands of column sums, and where the sums of the parts go: (parts, channels) each, null where they are not asked
/// for.
template <class T>
struct Columns {
  const T* dy;
  const T* x;  ///< null: sums of dy alone
  const float* means;
  const float* rstds;
  float* weight_parts;
  float* bias_parts;
  std::int64_t rows, channels;
  Cut cut;
  bool aligned;
};

/// Rows that a thread has on their way together.
constexpr int rows_at_once = 4;

/// Adds those of every eighth row from `first` on, as many as are read at once and are before `end`, in order.
template <class T, bool normalised>
TANDEM_DEVICE void add_rows(const Columns<T>& c, std::int64_t first, std::int64_t end, const Span& span, Floats& weight,
                            Floats& bias) {
  Raw<T> dy[rows_at_once], x[normalised ? rows_at_once : 1];
  TANDEM_UNROLL
  for (int k = 0; k < rows_at_once; ++k) {
    const std::int64_t row = first + k * most_warps;
    if (row >= end) continue;
    dy[k] = load_raw(c.dy + row * c.channels, span);
    if constexpr (normalised) x[k] = load_raw(c.x + row * c.channels, span);
  }
  TANDEM_UNROLL
  for (int k = 0; k < rows_at_once; ++k) {
    const std::int64_t row = first + k * most_warps;
    if (row >= end) continue;
    const Floats d = widened(dy[k]);
    for (int j = 0; j < packet; ++j) bias.x[j] = bias.x[j] + d.x[j];
    if constexpr (normalised) {
      const Floats v = widened(x[k]);
      const float mean = c.means != nullptr ? c.means[row] : 0.0F, rstd = c.rstds[row];
      for (int j = 0; j < packet; ++j) weight.x[j] = numerics::fma(d.x[j], (v.x[j] - mean) * rstd, weight.x[j]);
    }
  }
}

template <class T, bool normalised>
TANDEM_KERNEL(most_threads)
column_sums_kernel(Columns<T> c) {
  TANDEM_SHARED(float, room, columns_room);
  const std::int64_t tiles = ceil_div(c.channels, block_columns);
  const int lane = thread_index() % warp_lanes, warp = thread_index() / warp_lanes;
  for (std::int64_t i = block_index(); i < tiles * c.cut.parts; i += grid_size()) {
    const std::int64_t column = i % tiles * block_columns, part = i / tiles, begin = part * c.cut.size;
    const std::int64_t end = begin + c.cut.size < c.rows ? begin + c.cut.size : c.rows;
    const std::int64_t own = column + lane * packet;
    Floats weight = {}, bias = {};
    for (std::int64_t row = begin + warp; own < c.channels && row < end; row += rows_at_once * most_warps) {
      add_rows<T, normalised>(c, row, end, span_at(own, c.channels, c.aligned), weight, bias);
    }
    if (normalised) write_part(weight, room, column, c.channels, c.weight_parts + part * c.channels);
    if (c.bias_parts != nullptr) write_part(bias, room, column, c.channels, c.bias_parts + part * c.channels);
  }
}

/// A block for each 32 columns: its warps take turns at the parts.
TANDEM_KERNEL(most_threads)
add_parts_kernel(PartSums a, PartSums b, std::int64_t count, std::int64_t channels) {
  TANDEM_SHARED(float, room, most_threads);
  const std::int64_t tiles = ceil_div(channels, warp_lanes);
  const int lane = thread_index() % warp_lanes, warp = thread_index() / warp_lanes;
  for (std::int64_t i = block_index(); i < 2 * tiles; i += grid_size()) {
    // Members are chosen one by one: a reference to `a` or `b` would put both into memory.
    const float* const parts = i < tiles ? a.parts : b.parts;
    float* const sum = i < tiles ? a.sum : b.sum;
    if (sum == nullptr) continue;
    const std::int64_t column = i % tiles * warp_lanes + lane;
    float total = 0.0F;
    TANDEM_UNROLL_BY(8)
    for (std::int64_t part = warp; part < count; part += most_warps) {
      if (column < channels) total = total + parts[part * channels + column];
    }
    room[thread_index()] = total;
    barrier();
    total = 0.0F;
    for (int w = 0; w < most_warps; ++w) total = total + room[w * warp_lanes + lane];
    if (warp == 0 && column < channels) sum[column] = sum[column] + total;
    barrier();
  }
}

template <class T>
void run(const Columns<T>& c, float* dweight, float* dbias, CUstream_st* stream) {
  const std::int64_t tiles = ceil_div(c.channels, block_columns);
  const Geometry geometry{blocks_for(tiles * c.cut.parts, 1), most_threads};
  launch("column_sums", c.x != nullptr ? column_sums_kernel<T, true> : column_sums_kernel<T, false>, geometry, stream,
         c);
  add_parts({c.weight_parts, dweight}, {c.bias_parts, dbias}, c.cut.parts, c.channels, stream);
}

}  // namespace

void add_column_sums(TensorView dy, TensorView dbias, void* scratch, CUstream_st* stream) {
  add_norm_column_sums({.dy = dy, .dbias = dbias}, scratch, stream);
}

void add_norm_column_sums(const NormBackward& n, void* scratch, CUstream_st* stream) {
  const std::int64_t rows = n.dy.shape[0], channels = n.dy.shape[1];
  if (rows == 0 || (!n.dweight && !n.dbias)) return;
  float* const weight_parts = static_cast<float*>(scratch);
  float* const bias_parts = weight_parts + column_sums_scratch(channels) / 2 / sizeof(float);
  with_activation(n.dy.dtype, [&]<class T>(T) {
    const Columns<T> columns{.dy = n.dy.as<T>(),
                             .x = n.dweight ? n.x.as<T>() : nullptr,
                             .means = optional<float>(n.mean),
                             .rstds = optional<float>(n.rstd),
                             .weight_parts = n.dweight ? weight_parts : nullptr,
                             .bias_parts = n.dbias ? bias_parts : nullptr,
                             .rows = rows,
                             .channels = channels,
                             .cut = cut(rows, most_column_parts, least_rows),
                             .aligned = whole_packets<T>(channels) && aligned(n.dy.data, n.x.data)};
    run(columns, optional<float>(n.dweight), optional<float>(n.dbias), stream);
  });
}

void add_parts(const PartSums& a, const PartSums& b, std::int64_t count, std::int64_t channels, CUstream_st* stream) {
  if (a.sum == nullptr && b.sum == nullptr) return;
  const std::int64_t tiles = ceil_div(channels, warp_lanes);
  launch("add_parts", add_parts_kernel, Geometry{blocks_for(b.sum == nullptr ? tiles : 2 * tiles, 1), most_threads},
         stream, a, b, count, channels);
}

}  // namespace tandem::gpu
