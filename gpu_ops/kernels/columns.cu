// Sums over the rows of a matrix: gradients of biases and of the norms' parameters. Rows are cut into parts, a
// function of shapes alone; each part is summed by one block in a fixed order, then the parts in order. So no
// atomics are needed, and no sum depends on how many blocks a card runs at once.
#include "core/memory.hpp"
#include "gpu_ops/kernels.hpp"
#include "gpu_ops/kernels/elements.hpp"
#include "gpu_ops/launch.hpp"

namespace tandem::gpu {
namespace {

/// Parts that exist at most, and rows of a part at least: enough blocks for a card, few enough for the scratch.
constexpr std::int64_t most_parts = 64;
constexpr std::int64_t least_rows = 32;
/// Columns of a block: a packet for each lane of a warp. Its warps take turns at the rows.
constexpr int block_columns = warp_lanes * packet;

/// What is summed, and where the sums of the parts go: (parts, channels) each, null where they are not asked for.
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

/// Adds what the warps of the block summed for each column, in their order, and writes the part's sum.
TANDEM_DEVICE void write_part(const Floats& sums, float* room, std::int64_t column, std::int64_t channels,
                              float* part) {
  const int lane = thread_index() % warp_lanes, warp = thread_index() / warp_lanes;
  for (int i = 0; i < packet; ++i) room[warp * block_columns + lane * packet + i] = sums.x[i];
  barrier();
  float sum = 0.0F;
  for (int w = 0; w < most_warps; ++w) sum = sum + room[w * block_columns + thread_index()];
  if (column + thread_index() < channels) part[column + thread_index()] = sum;
  barrier();
}

template <class T>
TANDEM_KERNEL(most_threads)
column_sums_kernel(Columns<T> c) {
  static_assert(block_columns == most_threads);
  TANDEM_SHARED(float, room, most_warps* block_columns);
  const std::int64_t tiles = ceil_div(c.channels, block_columns);
  const int lane = thread_index() % warp_lanes, warp = thread_index() / warp_lanes;
  for (std::int64_t i = block_index(); i < tiles * c.cut.parts; i += grid_size()) {
    const std::int64_t column = i % tiles * block_columns, part = i / tiles, begin = part * c.cut.size;
    const std::int64_t end = begin + c.cut.size < c.rows ? begin + c.cut.size : c.rows;
    const std::int64_t own = column + lane * packet;
    Floats weight = {}, bias = {};
    for (std::int64_t row = begin + warp; own < c.channels && row < end; row += most_warps) {
      const Span span = span_at(own, c.channels, c.aligned);
      const Floats d = load(c.dy + row * c.channels, span);
      for (int j = 0; j < packet; ++j) bias.x[j] = bias.x[j] + d.x[j];
      if (c.x == nullptr) continue;
      const Floats v = load(c.x + row * c.channels, span);
      const float mean = c.means != nullptr ? c.means[row] : 0.0F, rstd = c.rstds[row];
      for (int j = 0; j < packet; ++j) weight.x[j] = numerics::fma(d.x[j], (v.x[j] - mean) * rstd, weight.x[j]);
    }
    if (c.weight_parts != nullptr) write_part(weight, room, column, c.channels, c.weight_parts + part * c.channels);
    if (c.bias_parts != nullptr) write_part(bias, room, column, c.channels, c.bias_parts + part * c.channels);
  }
}

TANDEM_KERNEL(most_threads)
add_parts_kernel(const float* parts, std::int64_t count, std::int64_t channels, float* sum) {
  for (std::int64_t c = block_index() * block_size() + thread_index(); c < channels; c += grid_size() * block_size()) {
    float total = 0.0F;
    for (std::int64_t part = 0; part < count; ++part) total = total + parts[part * channels + c];
    sum[c] = sum[c] + total;
  }
}

template <class T>
void run(Columns<T> c, float* dweight, float* dbias, CUstream_st* stream) {
  const std::int64_t tiles = ceil_div(c.channels, block_columns);
  launch("column_sums", column_sums_kernel<T>, Geometry{blocks_for(tiles * c.cut.parts, 1), most_threads}, stream, c);
  const Geometry geometry{blocks_for(c.channels, most_threads), most_threads};
  if (dweight != nullptr) {
    launch("add_parts", add_parts_kernel, geometry, stream, c.weight_parts, c.cut.parts, c.channels, dweight);
  }
  if (dbias != nullptr) {
    launch("add_parts", add_parts_kernel, geometry, stream, c.bias_parts, c.cut.parts, c.channels, dbias);
  }
}

}  // namespace

std::size_t column_sums_scratch(std::int64_t channels) {
  return 2 * align_up(static_cast<std::size_t>(most_parts * channels) * sizeof(float));
}

void add_column_sums(TensorView dy, TensorView dbias, void* scratch, CUstream_st* stream) {
  add_norm_column_sums(dy, {}, {}, {}, {}, dbias, scratch, stream);
}

void add_norm_column_sums(TensorView dy, TensorView x, TensorView mean, TensorView rstd, TensorView dweight,
                          TensorView dbias, void* scratch, CUstream_st* stream) {
  const std::int64_t rows = dy.shape[0], channels = dy.shape[1];
  if (rows == 0 || (!dweight && !dbias)) return;
  float* const weight_parts = static_cast<float*>(scratch);
  float* const bias_parts = weight_parts + column_sums_scratch(channels) / 2 / sizeof(float);
  with_activation(dy.dtype, [&]<class T>(T) {
    const Columns<T> columns{.dy = dy.as<T>(),
                             .x = dweight ? x.as<T>() : nullptr,
                             .means = optional<float>(mean),
                             .rstds = optional<float>(rstd),
                             .weight_parts = dweight ? weight_parts : nullptr,
                             .bias_parts = dbias ? bias_parts : nullptr,
                             .rows = rows,
                             .channels = channels,
                             .cut = cut(rows, most_parts, least_rows),
                             .aligned = whole_packets<T>(channels) && aligned(dy.data, x.data)};
    run(columns, optional<float>(dweight), optional<float>(dbias), stream);
  });
}

}  // namespace tandem::gpu
