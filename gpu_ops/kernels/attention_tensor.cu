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

/// The running softmax of this thread's two rows, in powers of two.
struct RunningRows {
  float largest[2] = {numerics::bits_float(lowest), numerics::bits_float(lowest)};
  float sum[2] = {0.0F, 0.0F};  ///< of this thread's columns
};

/// Takes in the products of the block's queries with the keys of the tile from `first` on: they become weights, and what
/// came of earlier keys is brought to the same scale. `scale` is that of powers of two. Not `masked`: all are seen, and
/// the scale is not negative, so that the largest product has the largest score. Bits are the same either way.
template <bool masked, int dim, int columns>
TANDEM_DEVICE void weigh(RunningRows& rows, Products<columns>& products, Products<dim>& out, const Band& band, int first,
                         float scale) {
  TANDEM_UNROLL
  for (int half = 0; half < 2; ++half) {
    const auto seen = [&](int j, int e) { return sees(band, own_row(half) - first, own_column(j, e)); };
    float top = numerics::bits_float(minus_infinity);
    TANDEM_UNROLL
    for (int j = 0; j < columns / 8; ++j) {
      for (int e = 2 * half; e < 2 * half + 2; ++e) {
        const float product = products.at[j].x[e];
        if (!masked) top = std::fmax(product, top);
        if (masked && seen(j, e)) top = std::fmax(scale * product, top);
      }
    }
    top = std::fmax(quad_max(masked ? top : scale * top), rows.largest[half]);
    float sum = 0.0F;
    TANDEM_UNROLL
    for (int j = 0; j < columns / 8; ++j) {
      for (int e = 2 * half; e < 2 * half + 2; ++e) {
        float& x = products.at[j].x[e];
        const float score = numerics::fma(scale, x, -top);
        x = exp2_estimate(!masked || seen(j, e) ? score : numerics::bits_float(minus_infinity));
        sum = sum + x;
      }
    }
    const float shrink = exp2_estimate(rows.largest[half] - top);
    rows.sum[half] = numerics::fma(rows.sum[half], shrink, sum);
    rows.largest[half] = top;
    TANDEM_UNROLL
    for (int j = 0; j < dim / 8; ++j) {
      for (int e = 2 * half; e < 2 * half + 2; ++e) out.at[j].x[e] = out.at[j].x[e] * shrink;
    }
  }
}

/// Products of the block's queries with `keys_at_once` keys from `first` on, to weights, to sums of values.
template <bool masked, int dim, class Queries>
TANDEM_DEVICE void take_keys(RunningRows& rows, Products<dim>& out, const Queries& queries, bf16* keys, bf16* values,
                             const Band& band, int first, float scale) {
  auto scores = with_rows<keys_at_once<dim>, dim>(queries, keys, first);
  weigh<masked>(rows, scores, out, band, first, scale);
  add_weighted(out, scores, values, first);
}

/// The statistic that backward starts from, a natural logarithm.
TANDEM_DEVICE float log_of_powers(float largest, float sum) {
  constexpr double ln_2 = 0.69314718055994530942;
  return static_cast<float>(static_cast<double>(largest) * ln_2 + std::log(static_cast<double>(sum)));
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
  const float scale = in_powers_of_two(shape.scale);
  RunningRows rows;
  Products<dim> out = {};
  const std::int64_t end = end_of_keys(tile.first, Size::rows, shape.sequence);
  for (std::int64_t key = first_key_of(tile.first, key_rows<dim>, operands.reach); key < end; key += key_rows<dim>) {
    stage<dim>(others, key, key_rows<dim>, shape, aligned, keys, values);
    staged();
    const Band band = band_of<Size::rows>(tile.first, key, operands.reach);
    for (int first = 0; first < key_rows<dim>; first += keys_at_once<dim>) {
      const RowRange some{first, first + keys_at_once<dim> - 1};
      if (!sees_any(band, own_range(), some)) continue;
      if (scale >= 0.0F && sees_all(band, own_range(), some)) {
        take_keys<false>(rows, out, queries, keys, values, band, first, scale);
      } else {
        take_keys<true>(rows, out, queries, keys, values, band, first, scale);
      }
    }
    barrier();
  }
  const float sum[2] = {quad_sum(rows.sum[0]), quad_sum(rows.sum[1])};
  const float factor[2] = {numerics::div(1.0F, sum[0]), numerics::div(1.0F, sum[1])};
  write_own_rows(head_at<bf16>(operands.out, shape, tile.b, tile.h), tile.first, shape, aligned, out, factor, memory);
  TANDEM_UNROLL
  for (int half = 0; half < 2; ++half) {
    const std::int64_t t = tile.first + own_row(half);
    if (operands.lse == nullptr || t >= shape.sequence || own_lane() % quad != 0) continue;
    operands.lse[(tile.b * shape.heads + tile.h) * shape.sequence + t] =
        log_of_powers(rows.largest[half], sum[half]);
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
