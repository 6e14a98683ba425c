// Attention forward on tensor cores.
#include "gpu_ops/base/launch.hpp"
#include "gpu_ops/kernels/attention_tensor.hpp"

namespace tandem::gpu {
namespace {

/// Keys and values of a buffer in shared memory, those of wide heads beside the block's queries: products with more
/// would not fit the registers.
template <int dim>
constexpr int key_rows = dim <= 64    ? 64
                         : dim <= 128 ? 32
                                      : 16;

/// The running softmax of this thread's two rows, in powers of two.
struct RunningRows {
  float largest[2] = {numerics::bits_float(lowest), numerics::bits_float(lowest)};
  float sum[2] = {0.0F, 0.0F};  ///< sums over this thread's columns
};

/// Takes in the products of the block's queries with a tile of keys: they become weights, and what came of earlier keys
/// is brought to the same scale.
template <int dim, int columns>
TANDEM_DEVICE void weigh(RunningRows& rows, Products<columns>& products, Products<dim>& out, float scale) {
  TANDEM_UNROLL
  for (int half = 0; half < 2; ++half) {
    float top = numerics::bits_float(minus_infinity);
    TANDEM_UNROLL
    for (int j = 0; j < columns / 8; ++j) {
      for (int e = 2 * half; e < 2 * half + 2; ++e) top = std::fmax(products.at[j].x[e], top);
    }
    top = std::fmax(scale * quad_max(top), rows.largest[half]);
    float sum = 0.0F;
    TANDEM_UNROLL
    for (int j = 0; j < columns / 8; ++j) {
      for (int e = 2 * half; e < 2 * half + 2; ++e) {
        float& x = products.at[j].x[e];
        x = exp2_estimate(numerics::fma(scale, x, -top));
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
  constexpr int buffer = 2 * key_rows<dim> * dim;
  bf16* const tiles = memory + (Size::wide ? Size::rows * dim : 0);
  bf16* const own = memory + (Size::wide ? 0 : buffer);  // memory that the second keys will take
  const TileOf tile = queries_of(first_tile + block_index(), Size::rows, shape);
  const std::int64_t group = shape.group();
  const HeadPair others = pair_at(operands.k, operands.v, shape, tile.b, tile.h / group);
  const std::int64_t begin = first_key_of(tile, key_rows<dim>, shape, operands.reach);
  const auto copy = [&](int i, int to) {
    bf16* const keys = tiles + to * buffer;
    stage<dim>(others, begin + i * key_rows<dim>, key_rows<dim>, shape, aligned, keys, keys + buffer / 2);
  };
  stage<dim>(head_at<bf16>(operands.q, shape, tile.b, tile.h), tile.first, Size::rows, shape, aligned, own);
  if (!Size::wide) copy(0, 0);
  if (!Size::wide) staged();
  const auto queries = own_factors<dim>(own);
  const ScoreScale scale = score_scale(shape.scale);
  const OwnSeen seen =
      own_seen(tile.first, [&](std::int64_t t) { return keys_seen(tile.b, t, shape, operands.reach); });
  RunningRows rows;
  Products<dim> out = {};
  const int count = tiles_between(begin, end_of_keys(tile.first, Size::rows, shape.sequence), key_rows<dim>);
  const int free = for_tiles<Size::buffers>(count, copy, [&](int i, int from) {
    bf16* const keys = tiles + from * buffer;  // and the values behind them
    const int first = static_cast<int>(begin) + i * key_rows<dim>;
    if (!sees_any(seen.warp, {first, first + key_rows<dim> - 1})) return;
    auto products = with_rows<key_rows<dim>, dim>(queries, keys, 0);
    sign_and_hide(products, scale.negative, seen, first);
    weigh(rows, products, out, scale.magnitude);
    add_weighted(out, products, keys, key_rows<dim>);
  });
  const float sum[2] = {quad_sum(rows.sum[0]), quad_sum(rows.sum[1])};
  const float factor[2] = {numerics::div(1.0F, sum[0]), numerics::div(1.0F, sum[1])};
  write_own_rows(head_at<bf16>(operands.out, shape, tile.b, tile.h), tile.first, shape, aligned, out, factor,
                 Size::wide ? own : tiles + free * buffer);
  TANDEM_UNROLL
  for (int half = 0; half < 2; ++half) {
    const std::int64_t t = tile.first + own_row(half);
    if (operands.lse == nullptr || t >= shape.sequence || own_lane() % quad != 0) continue;
    operands.lse[(tile.b * shape.heads + tile.h) * shape.sequence + t] = log_of_powers(rows.largest[half], sum[half]);
  }
}

}  // namespace

void tensor_attention(const ForwardOperands& operands, const AttentionShape& shape, const AttentionLimits& limits,
                      CUstream_st* stream) {
  const bool aligned = aligned_heads<bf16>(shape.head_dim, operands.q, operands.k, operands.v, operands.out);
  with_tensor_tiling(shape.head_dim, [&]<int dim>(TensorTiling<dim>) {
    using Size = TensorTiling<dim>;
    constexpr int rows = (Size::wide ? Size::rows : 0) + Size::buffers * 2 * key_rows<dim>;
    const TileWork work{shape.batch * shape.heads, 2.0, std::size_t{rows} * dim * sizeof(bf16)};
    in_launches<Size>(work, shape, limits, [&](std::int64_t first_tile, const Geometry& geometry) {
      launch("attention", tensor_attention_kernel<dim>, geometry, stream, operands, shape, first_tile, aligned);
    });
  });
}

}  // namespace tandem::gpu
