// Attention forward on tensor cores.
#include "gpu_ops/kernels/attention_tensor.hpp"
#include "gpu_ops/launch.hpp"

namespace tandem::gpu {
namespace {

/// Of the keys in shared memory: more would not fit the registers.
template <int dim>
constexpr int keys_at_once = dim <= 64 ? 64 : dim <= 128 ? 32 : 16;

/// Keys and values in shared memory at once; those of wide heads beside the block's queries.
template <int dim>
constexpr int key_rows = TensorTiling<dim>::wide ? 16 : 64;

/// The running softmax of this thread's two rows.
struct RunningRows {
  float largest[2] = {numerics::bits_float(lowest), numerics::bits_float(lowest)};
  float sum[2] = {0.0F, 0.0F};
};

/// Takes in the scores of the block's queries with the keys of the tile from `first` on: they become weights, and what
/// came of earlier keys is brought to the same scale.
template <int dim, int columns>
TANDEM_DEVICE void weigh(RunningRows& rows, Products<columns>& scores, Products<dim>& out, const Band& band, int first,
                         float scale) {
  TANDEM_UNROLL
  for (int half = 0; half < 2; ++half) {
    float top = rows.largest[half];
    TANDEM_UNROLL
    for (int j = 0; j < columns / 8; ++j) {
      for (int e = 2 * half; e < 2 * half + 2; ++e) {
        const bool seen = sees(band, own_row(half) - first, own_column(j, e));
        const float score = seen ? scale * scores.at[j].x[e] : numerics::bits_float(minus_infinity);
        scores.at[j].x[e] = score;
        top = score > top ? score : top;
      }
    }
    top = quad_max(top);
    float sum = 0.0F;
    TANDEM_UNROLL
    for (int j = 0; j < columns / 8; ++j) {
      for (int e = 2 * half; e < 2 * half + 2; ++e) {
        const float weight = numerics::exp(scores.at[j].x[e] - top);
        scores.at[j].x[e] = weight;
        sum = sum + weight;
      }
    }
    const float shrink = numerics::exp(rows.largest[half] - top);
    rows.sum[half] = numerics::fma(rows.sum[half], shrink, quad_sum(sum));
    rows.largest[half] = top;
    TANDEM_UNROLL
    for (int j = 0; j < dim / 8; ++j) {
      for (int e = 2 * half; e < 2 * half + 2; ++e) out.at[j].x[e] = out.at[j].x[e] * shrink;
    }
  }
}

template <int dim>
TANDEM_KERNEL_BY(TensorTiling<dim>::threads, TensorTiling<dim>::blocks)
tensor_attention_kernel(ForwardOperands operands, AttentionShape shape, std::int64_t first_tile, bool aligned) {
  using Size = TensorTiling<dim>;
  TANDEM_DYNAMIC_SHARED(bf16, memory);
  bf16* const keys = memory + (Size::wide ? Size::rows * dim : 0);
  bf16* const values = keys + key_rows<dim> * dim;
  const TileOf tile = queries_of(first_tile + block_index(), Size::rows, shape);
  const std::int64_t group = shape.heads / shape.kv_heads;
  const HeadPair others = pair_at(operands.k, operands.v, shape, tile.b, tile.h / group);
  stage<dim>(head_at<bf16>(operands.q, shape, tile.b, tile.h), tile.first, Size::rows, shape, aligned, memory);
  if (!Size::wide) staged();
  const auto queries = own_factors<dim>(memory);
  if (!Size::wide) barrier();
  RunningRows rows;
  Products<dim> out = {};
  const std::int64_t end = end_of_keys(tile.first, Size::rows, shape.sequence);
  for (std::int64_t key = first_key_of(tile.first, key_rows<dim>, operands.reach); key < end; key += key_rows<dim>) {
    stage<dim>(others, key, key_rows<dim>, shape, aligned, keys, values);
    staged();
    const Band band = band_of<Size::rows>(tile.first, key, operands.reach);
    for (int first = 0; first < key_rows<dim>; first += keys_at_once<dim>) {
      auto scores = with_rows<keys_at_once<dim>, dim>(queries, keys, first);
      weigh(rows, scores, out, band, first, shape.scale);
      add_weighted(out, scores, values, first);
    }
    barrier();
  }
  const float factor[2] = {numerics::div(1.0F, rows.sum[0]), numerics::div(1.0F, rows.sum[1])};
  write_own_rows(head_at<bf16>(operands.out, shape, tile.b, tile.h), tile.first, shape, aligned, out, factor, memory);
  TANDEM_UNROLL
  for (int half = 0; half < 2; ++half) {
    const std::int64_t t = tile.first + own_row(half);
    if (operands.lse == nullptr || t >= shape.sequence || own_lane() % quad != 0) continue;
    operands.lse[(tile.b * shape.heads + tile.h) * shape.sequence + t] =
        log_of_sum(rows.largest[half], rows.sum[half]);
  }
}

}  // namespace

void tensor_attention(const ForwardOperands& operands, const AttentionShape& shape, const AttentionLimits& limits,
                      CUstream_st* stream) {
  const bool aligned = aligned_heads<bf16>(shape.head_dim, operands.q, operands.k, operands.v, operands.out);
  with_tensor_tiling(shape.head_dim, [&]<int dim>(TensorTiling<dim>) {
    using Size = TensorTiling<dim>;
    constexpr int rows = (Size::wide ? Size::rows : 0) + 2 * key_rows<dim>;
    const TileWork work{shape.batch * shape.heads, 2.0, std::size_t{rows} * dim * sizeof(bf16)};
    in_launches<Size>(work, shape, limits, [&](std::int64_t first_tile, const Geometry& geometry) {
      launch("attention", tensor_attention_kernel<dim>, geometry, stream, operands, shape, first_tile, aligned);
    });
  });
}

}  // namespace tandem::gpu
