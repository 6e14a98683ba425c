// Attention forward in fp32: a block for each tile of queries of one head, keys and values tile by tile.
#include "gpu_ops/base/launch.hpp"
#include "gpu_ops/kernels/attention_tiles.hpp"

namespace tandem::gpu {
namespace {

/// The running softmax of one row of queries, alike in all threads of its quad but for their share of `out`.
template <int dim>
struct Running {
  float largest;
  float sum;
  Quarter<dim> out;  ///< sum of weights times values
};

/// Takes in the scores of this quad's query with the staged keys: weights into this row of `weights`.
template <int dim>
TANDEM_DEVICE void weigh(Running<dim>& row, const float* query, const float* keys, const Seen& seen, int first_key,
                         float scale, float* weights) {
  Scores<dim> score = row_products<dim>(query, keys);
  float top = row.largest;
  TANDEM_UNROLL
  for (int j = 0; j < Tiling<dim>::own_scores; ++j) {
    score.x[j] = sees(seen, first_key + column_of(j)) ? scale * score.x[j] : numerics::bits_float(minus_infinity);
    top = score.x[j] > top ? score.x[j] : top;
  }
  top = quad_max(top);
  float sum = 0.0F;
  TANDEM_UNROLL
  for (int j = 0; j < Tiling<dim>::own_scores; ++j) {
    const float weight = numerics::exp(score.x[j] - top);
    weights[column_of(j)] = weight;
    sum = sum + weight;
  }
  const float shrink = numerics::exp(row.largest - top);
  row.sum = numerics::fma(row.sum, shrink, quad_sum(sum));
  row.largest = top;
  for (int p = 0; p < Tiling<dim>::own_pieces; ++p) {
    for (int i = 0; i < 4; ++i) row.out.piece[p].x[i] = row.out.piece[p].x[i] * shrink;
  }
}

template <int dim>
TANDEM_KERNEL(Tiling<dim>::threads)
attention_kernel(ForwardOperands operands, AttentionShape shape, std::int64_t first_tile, bool aligned) {
  using Size = Tiling<dim>;
  TANDEM_DYNAMIC_SHARED(float, memory);
  float* const queries = memory;
  float* const others = queries + Size::tile_floats;  // keys, then values
  const int row = thread_index() / quad;
  float* const weights = others + Size::tile_floats + row * Size::score_pitch;
  const TileOf tile = queries_of(first_tile + block_index(), Size::rows, shape);
  const auto [first_query, b, h] = tile;
  const std::int64_t t = first_query + row, group = shape.group();
  const Head<float> k = head_at<float>(operands.k, shape, b, h / group),
                    v = head_at<float>(operands.v, shape, b, h / group);
  stage_rows<dim>(head_at<float>(operands.q, shape, b, h), first_query, shape, aligned, queries);
  Running<dim> running = {numerics::bits_float(lowest), 0.0F, {}};
  const Seen seen = keys_seen(b, t, shape, operands.reach);
  const std::int64_t first_key = first_key_of(tile, Size::rows, shape, operands.reach);
  for (std::int64_t key = first_key; key <= first_query; key += Size::rows) {
    stage_rows<dim>(k, key, shape, aligned, others);
    barrier();
    weigh(running, queries + row * Size::pitch, others, seen, static_cast<int>(key), shape.scale, weights);
    barrier();
    stage_rows<dim>(v, key, shape, aligned, others);
    barrier();
    TANDEM_UNROLL_BY(4)
    for (int c = 0; c < Size::rows; ++c) add_row_times(running.out, weights[c], others + c * Size::pitch);
    barrier();
  }
  write_row(head_at<float>(operands.out, shape, b, h), t, shape, running.out, numerics::div(1.0F, running.sum));
  if (operands.lse != nullptr && t < shape.sequence && thread_index() % quad == 0) {
    operands.lse[(b * shape.heads + h) * shape.sequence + t] = log_of_sum(running.largest, running.sum);
  }
}

}  // namespace

void plain_attention(const AttentionForward& call, CUstream_st* stream, const std::optional<AttentionLimits>& limits) {
  const AttentionShape& shape = call.shape;
  require_narrow_heads(shape);
  const ForwardOperands operands{.q = call.q,
                                 .k = call.k,
                                 .v = call.v,
                                 .out = {call.out.data, call.out.dtype, shape.heads * shape.head_dim},
                                 .lse = optional<float>(call.lse),
                                 .reach = shape.reach()};
  if (call.q.dtype == DType::bf16) return tensor_attention(operands, shape, limits.value_or(tensor_limits), stream);
  const AttentionLimits of_fp32 = limits.value_or(AttentionLimits{});
  const bool aligned = aligned_heads<float>(shape.head_dim, call.q, call.k, call.v);
  with_tiling(shape.head_dim, [&]<int dim>(Tiling<dim>) {
    using Size = Tiling<dim>;
    const TileWork work{shape.batch * shape.heads, 2.0, (2 * Size::tile_floats + Size::score_floats) * sizeof(float)};
    in_launches<Size>(work, shape, of_fp32, [&](std::int64_t first_tile, const Geometry& geometry) {
      launch("attention", attention_kernel<dim>, geometry, stream, operands, shape, first_tile, aligned);
    });
  });
}

}  // namespace tandem::gpu
