// Attention backward on tensor cores, in two kernels as in attention_backward.cu: of dq, and of dk and dv.
#include "gpu_ops/kernels/attention_tensor.hpp"
#include "gpu_ops/launch.hpp"

namespace tandem::gpu {
namespace {

/// Of the rows in shared memory: more would not fit the registers.
template <int dim>
constexpr int at_once = dim <= 64 ? 32 : 16;
/// Queries that dk and dv take to shared memory at once, beside the block's keys and values.
constexpr int query_rows = 32;

template <int dim>
TANDEM_KERNEL(TensorTiling<dim>::threads)
tensor_dq_kernel(BackwardOperands operands, AttentionShape shape, TileRange range, bool aligned) {
  using Size = TensorTiling<dim>;
  TANDEM_DYNAMIC_SHARED(bf16, memory);
  bf16* const keys = memory;
  bf16* const values = keys + Size::rows * dim;
  for (std::int64_t i = range.begin + block_index(); i < range.end; i += grid_size()) {
    const TileOf tile = queries_of(i, Size::rows, shape);
    const std::int64_t group = shape.heads / shape.kv_heads;
    const HeadPair others = pair_at(operands.k, operands.v, shape, tile.b, tile.h / group);
    const HeadPair own = pair_at(operands.q, operands.dout, shape, tile.b, tile.h);
    stage<dim>(own, tile.first, Size::rows, shape, aligned, keys, values);
    staged();
    const Rows<dim> queries = own_rows<dim>(keys), douts = own_rows<dim>(values);
    barrier();
    float lse[2], delta[2];
    TANDEM_UNROLL
    for (int half = 0; half < 2; ++half) {
      const std::int64_t t = tile.first + own_row(half);
      const std::int64_t statistic = (tile.b * shape.heads + tile.h) * shape.sequence + t;
      lse[half] = t < shape.sequence ? operands.lse[statistic] : 0.0F;
      delta[half] = t < shape.sequence ? operands.delta[statistic] : 0.0F;
    }
    Products<dim> sums = {};
    const std::int64_t first_key = first_key_of(tile.first, Size::rows, operands.reach);
    for (std::int64_t key = first_key; key <= tile.first; key += Size::rows) {
      stage<dim>(others, key, Size::rows, shape, aligned, keys, values);
      staged();
      const Band band = band_of<Size::rows>(tile.first, key, operands.reach);
      for (int first = 0; first < Size::rows; first += at_once<dim>) {
        const auto products = with_rows<at_once<dim>>(queries, keys, first);
        auto dscores = with_rows<at_once<dim>>(douts, values, first);
        TANDEM_UNROLL
        for (int j = 0; j < at_once<dim> / 8; ++j) {
          for (int e = 0; e < 4; ++e) {
            const bool seen = sees(band, own_row(e / 2), first + own_column(j, e));
            float& dscore = dscores.at[j].x[e];
            const float weight = seen ? weight_of(products.at[j].x[e], lse[e / 2], shape.scale) : 0.0F;
            dscore = dscore_of(weight, dscore, delta[e / 2], shape.scale);
          }
        }
        add_weighted(sums, dscores, keys, first);
      }
      barrier();
    }
    write_own_rows(head_at<bf16>(operands.dq, shape, tile.b, tile.h), tile.first, shape, aligned, sums, {1.0F, 1.0F},
                   keys);
    barrier();
  }
}

template <int dim>
TANDEM_KERNEL(TensorTiling<dim>::threads)
tensor_dkv_kernel(BackwardOperands operands, AttentionShape shape, TileRange range, bool aligned) {
  using Size = TensorTiling<dim>;
  TANDEM_DYNAMIC_SHARED(bf16, memory);
  bf16* const keys = memory;
  bf16* const values = keys + Size::rows * dim;
  bf16* const queries = values + Size::rows * dim;
  bf16* const douts = queries + query_rows * dim;
  TANDEM_SHARED(float, lse, query_rows);
  TANDEM_SHARED(float, delta, query_rows);
  const std::int64_t group = shape.heads / shape.kv_heads;
  for (std::int64_t i = range.begin + block_index(); i < range.end; i += grid_size()) {
    const TileOf tile = keys_of(i, Size::rows, shape);
    const std::int64_t end = end_of_queries(tile.first, Size::rows, operands.reach, shape.sequence);
    const HeadPair own = pair_at(operands.k, operands.v, shape, tile.b, tile.h);
    stage<dim>(own, tile.first, Size::rows, shape, aligned, keys, values);
    Products<dim> dk = {}, dv = {};
    for (std::int64_t h = tile.h * group; h < (tile.h + 1) * group; ++h) {
      const HeadPair others = pair_at(operands.q, operands.dout, shape, tile.b, h);
      const std::int64_t statistics = (tile.b * shape.heads + h) * shape.sequence;
      for (std::int64_t query = tile.first; query < end; query += query_rows) {
        stage<dim>(others, query, query_rows, shape, aligned, queries, douts);
        if (thread_index() < query_rows) {  // zeros behind the last token, as its rows: they add nothing
          const std::int64_t u = query + thread_index();
          lse[thread_index()] = u < shape.sequence ? operands.lse[statistics + u] : 0.0F;
          delta[thread_index()] = u < shape.sequence ? operands.delta[statistics + u] : 0.0F;
        }
        staged();
        const Band band = band_of<Size::rows>(query, tile.first, operands.reach);
        for (int first = 0; first < query_rows; first += at_once<dim>) {
          auto weights = with_rows<at_once<dim>, dim>(keys, queries, first);
          TANDEM_UNROLL
          for (int j = 0; j < at_once<dim> / 8; ++j) {
            for (int e = 0; e < 4; ++e) {
              const int column = first + own_column(j, e);
              const bool seen = sees(band, column, own_row(e / 2));
              weights.at[j].x[e] = seen ? weight_of(weights.at[j].x[e], lse[column], shape.scale) : 0.0F;
            }
          }
          add_weighted(dv, weights, douts, first);
          auto dscores = with_rows<at_once<dim>, dim>(values, douts, first);
          TANDEM_UNROLL
          for (int j = 0; j < at_once<dim> / 8; ++j) {
            for (int e = 0; e < 4; ++e) {
              float& dscore = dscores.at[j].x[e];
              dscore = dscore_of(weights.at[j].x[e], dscore, delta[first + own_column(j, e)], shape.scale);
            }
          }
          add_weighted(dk, dscores, queries, first);
        }
        barrier();
      }
    }
    write_own_rows(head_at<bf16>(operands.dk, shape, tile.b, tile.h), tile.first, shape, aligned, dk, {1.0F, 1.0F},
                   keys);
    write_own_rows(head_at<bf16>(operands.dv, shape, tile.b, tile.h), tile.first, shape, aligned, dv, {1.0F, 1.0F},
                   values);
    barrier();
  }
}

}  // namespace

void tensor_attention_backward(const BackwardOperands& o, const AttentionShape& shape, const AttentionLimits& limits,
                               CUstream_st* stream) {
  const bool aligned = aligned_heads<bf16>(shape.head_dim, o.dout, o.q, o.k, o.v, o.dq, o.dk, o.dv);
  with_tensor_tiling(shape.head_dim, [&]<int dim>(TensorTiling<dim>) {
    using Size = TensorTiling<dim>;
    constexpr std::size_t row = dim * sizeof(bf16);
    const TileWork queries{shape.batch * shape.heads, 3.0, 2 * Size::rows * row};
    in_launches<Size>(queries, shape, limits, [&](TileRange range, const Geometry& geometry) {
      launch("attention_dq", tensor_dq_kernel<dim>, geometry, stream, o, shape, range, aligned);
    });
    const TileWork keys{shape.batch * shape.kv_heads, 4.0 * static_cast<double>(shape.heads / shape.kv_heads),
                        2 * (Size::rows + query_rows) * row};
    in_launches<Size>(keys, shape, limits, [&](TileRange range, const Geometry& geometry) {
      launch("attention_dkv", tensor_dkv_kernel<dim>, geometry, stream, o, shape, range, aligned);
    });
  });
}

}  // namespace tandem::gpu
