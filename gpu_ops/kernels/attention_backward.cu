// Attention backward, in two kernels that recompute the weights: one owns queries and sums dq over keys, the other
// owns keys and sums dk and dv over the queries of all heads that share them. With P the weights and
// delta = dout . out: dS = P (dP - delta) scale.
#include "gpu_ops/kernels/attention_tiles.hpp"
#include "gpu_ops/kernels/block_sums.hpp"
#include "gpu_ops/launch.hpp"

namespace tandem::gpu {
namespace {

/// A warp for each row of each head.
template <class T>
TANDEM_KERNEL(most_threads)
delta_kernel(BackwardOperands operands, AttentionShape shape) {
  const int lane = thread_index() % warp_lanes;
  const std::int64_t rows = shape.batch * shape.heads * shape.sequence;
  for (std::int64_t i = block_index() * most_warps + thread_index() / warp_lanes; i < rows;
       i += grid_size() * most_warps) {
    const std::int64_t t = i % shape.sequence, h = i / shape.sequence % shape.heads;
    const std::int64_t b = i / shape.sequence / shape.heads;
    const Head<T> out = head_at<T>(operands.out, shape, b, h), dout = head_at<T>(operands.dout, shape, b, h);
    float sum = 0.0F;
    for (std::int64_t d = lane; d < shape.head_dim; d += warp_lanes) {
      sum = numerics::fma(to_float(dout.data[t * dout.stride + d]), to_float(out.data[t * out.stride + d]), sum);
    }
    sum = warp_sum(sum);
    if (lane == 0) operands.delta[i] = sum;
  }
}

template <int dim>
TANDEM_KERNEL(Tiling<dim>::threads)
dq_kernel(BackwardOperands operands, AttentionShape shape, std::int64_t first_tile, bool aligned) {
  using Size = Tiling<dim>;
  TANDEM_DYNAMIC_SHARED(float, memory);
  float* const queries = memory;
  float* const douts = queries + Size::tile_floats;
  float* const keys = douts + Size::tile_floats;
  float* const values = keys + Size::tile_floats;
  const int row = thread_index() / quad;
  float* const dscores = values + Size::tile_floats + row * Size::score_pitch;
  const auto [first_query, b, h] = queries_of(first_tile + block_index(), Size::rows, shape);
  const std::int64_t t = first_query + row, group = shape.heads / shape.kv_heads;
  const Head<float> k = head_at<float>(operands.k, shape, b, h / group),
                    v = head_at<float>(operands.v, shape, b, h / group);
  stage_rows<dim>(head_at<float>(operands.q, shape, b, h), first_query, shape, aligned, queries);
  stage_rows<dim>(head_at<float>(operands.dout, shape, b, h), first_query, shape, aligned, douts);
  const std::int64_t statistic = (b * shape.heads + h) * shape.sequence + t;
  const float lse = t < shape.sequence ? operands.lse[statistic] : 0.0F;
  const float delta = t < shape.sequence ? operands.delta[statistic] : 0.0F;
  Quarter<dim> sums = {};
  const std::int64_t first_key = first_key_of(first_query, Size::rows, operands.reach);
  for (std::int64_t key = first_key; key <= first_query; key += Size::rows) {
    stage_rows<dim>(k, key, shape, aligned, keys);
    stage_rows<dim>(v, key, shape, aligned, values);
    barrier();
    const Scores<dim> products = row_products<dim>(queries + row * Size::pitch, keys);
    const Scores<dim> dweights = row_products<dim>(douts + row * Size::pitch, values);
    const Band band = band_of<Size::rows>(first_query, key, operands.reach);
    TANDEM_UNROLL
    for (int j = 0; j < Size::own_scores; ++j) {
      const bool seen = sees(band, row, column_of(j));
      const float weight = seen ? weight_of(products.x[j], lse, shape.scale) : 0.0F;
      dscores[column_of(j)] = dscore_of(weight, dweights.x[j], delta, shape.scale);
    }
    warp_barrier();
    TANDEM_UNROLL_BY(4)
    for (int c = 0; c < Size::rows; ++c) add_row_times(sums, dscores[c], keys + c * Size::pitch);
    barrier();
  }
  write_row(head_at<float>(operands.dq, shape, b, h), t, shape, sums, 1.0F);
}

template <int dim>
TANDEM_KERNEL(Tiling<dim>::threads)
dkv_kernel(BackwardOperands operands, AttentionShape shape, std::int64_t first_tile, bool aligned) {
  using Size = Tiling<dim>;
  TANDEM_DYNAMIC_SHARED(float, memory);
  float* const keys = memory;
  float* const values = keys + Size::tile_floats;
  float* const queries = values + Size::tile_floats;
  float* const douts = queries + Size::tile_floats;
  const int row = thread_index() / quad;
  float* const weights = douts + Size::tile_floats + row * Size::score_pitch;
  float* const dscores = weights + Size::score_floats;
  const std::int64_t group = shape.heads / shape.kv_heads;
  const auto [first_key, b, kv] = keys_of(first_tile + block_index(), Size::rows, shape);
  const std::int64_t t = first_key + row, end = end_of_queries(first_key, Size::rows, operands.reach, shape.sequence);
  stage_rows<dim>(head_at<float>(operands.k, shape, b, kv), first_key, shape, aligned, keys);
  stage_rows<dim>(head_at<float>(operands.v, shape, b, kv), first_key, shape, aligned, values);
  Quarter<dim> dk = {}, dv = {};
  for (std::int64_t h = kv * group; h < (kv + 1) * group; ++h) {
    const float* const lse = operands.lse + (b * shape.heads + h) * shape.sequence;
    const float* const delta = operands.delta + (b * shape.heads + h) * shape.sequence;
    for (std::int64_t query = first_key; query < end; query += Size::rows) {
      stage_rows<dim>(head_at<float>(operands.q, shape, b, h), query, shape, aligned, queries);
      stage_rows<dim>(head_at<float>(operands.dout, shape, b, h), query, shape, aligned, douts);
      barrier();
      const Scores<dim> products = row_products<dim>(keys + row * Size::pitch, queries);
      const Scores<dim> dweights = row_products<dim>(values + row * Size::pitch, douts);
      const Band band = band_of<Size::rows>(query, first_key, operands.reach);
      TANDEM_UNROLL
      for (int j = 0; j < Size::own_scores; ++j) {
        const std::int64_t u = query + column_of(j);
        const bool seen = sees(band, column_of(j), row) && u < shape.sequence;
        const float weight = seen ? weight_of(products.x[j], lse[u], shape.scale) : 0.0F;
        weights[column_of(j)] = weight;
        dscores[column_of(j)] = seen ? dscore_of(weight, dweights.x[j], delta[u], shape.scale) : 0.0F;
      }
      warp_barrier();
      TANDEM_UNROLL_BY(4)
      for (int c = 0; c < Size::rows; ++c) {
        add_row_times(dv, weights[c], douts + c * Size::pitch);
        add_row_times(dk, dscores[c], queries + c * Size::pitch);
      }
      barrier();
    }
  }
  write_row(head_at<float>(operands.dk, shape, b, kv), t, shape, dk, 1.0F);
  write_row(head_at<float>(operands.dv, shape, b, kv), t, shape, dv, 1.0F);
}

}  // namespace

void plain_attention_backward(const AttentionBackward& call, void* scratch, CUstream_st* stream,
                              const std::optional<AttentionLimits>& limits) {
  const AttentionShape& shape = call.shape;
  require_narrow_heads(shape);
  const std::int64_t dense = shape.heads * shape.head_dim, rows = shape.batch * shape.sequence;
  const BackwardOperands operands{.dout = {call.dout.data, call.dout.dtype, dense},
                                  .q = call.q,
                                  .k = call.k,
                                  .v = call.v,
                                  .out = {call.out.data, call.out.dtype, dense},
                                  .dq = call.dq,
                                  .dk = call.dk,
                                  .dv = call.dv,
                                  .lse = call.lse.as<float>(),
                                  .delta = static_cast<float*>(scratch),
                                  .reach = shape.reach()};
  with_activation(call.q.dtype, [&]<class T>(T) {
    launch("attention_delta", delta_kernel<T>, Geometry{blocks_for(rows * shape.heads, most_warps), most_threads},
           stream, operands, shape);
  });
  if (call.q.dtype == DType::bf16) {
    return tensor_attention_backward(operands, shape, limits.value_or(tensor_limits), stream);
  }
  const AttentionLimits of_fp32 = limits.value_or(AttentionLimits{});
  const bool aligned = aligned_heads<float>(shape.head_dim, operands.dout, call.q, call.k, call.v);
  with_tiling(shape.head_dim, [&]<int dim>(Tiling<dim>) {
    using Size = Tiling<dim>;
    const std::size_t bytes = (4 * Size::tile_floats + Size::score_floats) * sizeof(float);
    const TileWork queries{shape.batch * shape.heads, 3.0, bytes};
    in_launches<Size>(queries, shape, of_fp32, [&](std::int64_t first_tile, const Geometry& geometry) {
      launch("attention_dq", dq_kernel<dim>, geometry, stream, operands, shape, first_tile, aligned);
    });
    const TileWork keys{shape.batch * shape.kv_heads, 4.0 * static_cast<double>(shape.heads / shape.kv_heads),
                        bytes + Size::score_floats * sizeof(float)};
    in_launches<Size>(keys, shape, of_fp32, [&](std::int64_t first_tile, const Geometry& geometry) {
      launch("attention_dkv", dkv_kernel<dim>, geometry, stream, operands, shape, first_tile, aligned);
    });
  });
}

}  // namespace tandem::gpu
