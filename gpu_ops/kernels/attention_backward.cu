// Attention backward, in two kernels that recompute the weights: one owns queries and sums dq over keys, the other
// owns keys and sums dk and dv over the queries of all heads that share them. With P the weights and
// delta = dout . out: dS = P (dP - delta) scale.
#include "gpu_ops/base/launch.hpp"
#include "gpu_ops/kernels/attention_tiles.hpp"

namespace tandem::gpu {
namespace {

/// How rows are handed out for delta: a packet to a lane, and to a block all heads of some tokens, which lie side by
/// side.
struct DeltaWork {
  int lanes;   ///< lanes per row, a power of two
  int tokens;  ///< tokens per block
  std::int64_t blocks;
};
/// Rows of which a thread has packets on their way at once.
constexpr int delta_rows = 4;

DeltaWork delta_work(const AttentionShape& shape) {
  int lanes = 1;
  while (lanes * packet < shape.head_dim) lanes *= 2;
  const std::int64_t rows = std::int64_t{most_threads} / lanes * delta_rows;
  const std::int64_t tokens = std::max<std::int64_t>(1, rows / shape.heads);
  return {lanes, static_cast<int>(tokens), ceil_div(shape.batch * shape.sequence, tokens)};
}

template <class T>
TANDEM_DEVICE float packet_product(const Raw<T>& a, const Raw<T>& b) {
  const Floats x = widened(a), y = widened(b);
  float sum = 0.0F;
  for (int i = 0; i < packet; ++i) sum = numerics::fma(x.x[i], y.x[i], sum);
  return sum;
}

/// The first of the tokens that a block has together.
struct FirstToken {
  std::int64_t b, t;
};
/// Offset of a head's statistic, of the token `ahead` of the first: in the same sequence, or in a later one.
TANDEM_DEVICE std::int64_t statistic_at(FirstToken token, int ahead, int head, const AttentionShape& shape) {
  for (token.t += ahead; token.t >= shape.sequence; token.t -= shape.sequence) ++token.b;
  return (token.b * shape.heads + head) * shape.sequence + token.t;
}

/// out and dout are dense. `whole`: all of a row's packets are whole and aligned.
template <class T, bool whole>
TANDEM_KERNEL(most_threads)
delta_kernel(BackwardOperands operands, AttentionShape shape, DeltaWork work) {
  const int heads = static_cast<int>(shape.heads), rows_at_once = block_size() / work.lanes;
  const int own = thread_index() / work.lanes, lane = thread_index() % work.lanes;
  const bool there = lane * packet < shape.head_dim;
  const Span span = span_at(lane * packet, shape.head_dim, whole);
  const T* const out = static_cast<const T*>(operands.out.data);
  const T* const dout = static_cast<const T*>(operands.dout.data);
  for (std::int64_t i = block_index(); i < work.blocks; i += grid_size()) {
    const std::int64_t token = i * work.tokens, left = shape.batch * shape.sequence - token;
    const FirstToken first_token{token / shape.sequence, token % shape.sequence};
    const std::int64_t begin = token * heads * shape.head_dim;
    const int rows = heads * static_cast<int>(left < work.tokens ? left : work.tokens);
    for (int first = 0; first < rows; first += delta_rows * rows_at_once) {
      Raw<T> a[delta_rows] = {}, b[delta_rows] = {};
      TANDEM_UNROLL
      for (int k = 0; k < delta_rows; ++k) {
        const int row = first + k * rows_at_once + own;
        const std::int64_t at = begin + std::int64_t{row} * static_cast<int>(shape.head_dim);
        if (row >= rows || !there) continue;
        a[k] = whole ? wide_load_raw(out + at + span.at) : load_raw(out + at, span);
        b[k] = whole ? wide_load_raw(dout + at + span.at) : load_raw(dout + at, span);
      }
      TANDEM_UNROLL
      for (int k = 0; k < delta_rows; ++k) {
        const int row = first + k * rows_at_once + own;
        float sum = packet_product(a[k], b[k]);
        for (int distance = 1; distance < work.lanes; distance *= 2) sum = sum + shuffle_xor(sum, distance);
        if (row >= rows || lane > 0) continue;
        operands.delta[statistic_at(first_token, row / heads, row % heads, shape)] = sum;
      }
    }
  }
}

template <class T>
void make_delta(const BackwardOperands& operands, const AttentionShape& shape, CUstream_st* stream) {
  const DeltaWork work = delta_work(shape);
  const Geometry geometry{blocks_for(work.blocks, 1), most_threads};
  if (shape.head_dim % packet == 0 && aligned(operands.out.data, operands.dout.data)) {
    launch("attention_delta", delta_kernel<T, true>, geometry, stream, operands, shape, work);
  } else {
    launch("attention_delta", delta_kernel<T, false>, geometry, stream, operands, shape, work);
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
  const TileOf tile = queries_of(first_tile + block_index(), Size::rows, shape);
  const auto [first_query, b, h] = tile;
  const std::int64_t t = first_query + row, group = shape.group();
  const Head<float> k = head_at<float>(operands.k, shape, b, h / group),
                    v = head_at<float>(operands.v, shape, b, h / group);
  stage_rows<dim>(head_at<float>(operands.q, shape, b, h), first_query, shape, aligned, queries);
  stage_rows<dim>(head_at<float>(operands.dout, shape, b, h), first_query, shape, aligned, douts);
  const std::int64_t statistic = (b * shape.heads + h) * shape.sequence + t;
  const float lse = t < shape.sequence ? operands.lse[statistic] : 0.0F;
  const float delta = t < shape.sequence ? operands.delta[statistic] : 0.0F;
  Quarter<dim> sums = {};
  const Seen own = keys_seen(b, t, shape, operands.reach);
  const std::int64_t first_key = first_key_of(tile, Size::rows, shape, operands.reach);
  for (std::int64_t key = first_key; key <= first_query; key += Size::rows) {
    stage_rows<dim>(k, key, shape, aligned, keys);
    stage_rows<dim>(v, key, shape, aligned, values);
    barrier();
    const Scores<dim> products = row_products<dim>(queries + row * Size::pitch, keys);
    const Scores<dim> dweights = row_products<dim>(douts + row * Size::pitch, values);
    TANDEM_UNROLL
    for (int j = 0; j < Size::own_scores; ++j) {
      const bool seen = sees(own, static_cast<int>(key) + column_of(j));
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
  const std::int64_t group = shape.group();
  const TileOf tile = keys_of(first_tile + block_index(), Size::rows, shape);
  const auto [first_key, b, kv] = tile;
  const std::int64_t t = first_key + row, end = end_of_queries(tile, Size::rows, shape, operands.reach);
  const Seen own = queries_seen(b, t, shape, operands.reach);
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
      TANDEM_UNROLL
      for (int j = 0; j < Size::own_scores; ++j) {
        const std::int64_t u = query + column_of(j);
        const bool seen = sees(own, static_cast<int>(u)) && u < shape.sequence;
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
  const std::int64_t dense = shape.heads * shape.head_dim;
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
  with_activation(call.q.dtype, [&]<class T>(T) { make_delta<T>(operands, shape, stream); });
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
    const TileWork keys{shape.batch * shape.kv_heads, 4.0 * static_cast<double>(shape.group()),
                        bytes + Size::score_floats * sizeof(float)};
    in_launches<Size>(keys, shape, of_fp32, [&](std::int64_t first_tile, const Geometry& geometry) {
      launch("attention_dkv", dkv_kernel<dim>, geometry, stream, operands, shape, first_tile, aligned);
    });
  });
}

}  // namespace tandem::gpu
