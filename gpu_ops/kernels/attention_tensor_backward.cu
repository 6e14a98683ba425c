// Attention backward on tensor cores, in two kernels as in attention_backward.cu: of dq, and of dk and dv.
#include <type_traits>

#include "gpu_ops/kernels/attention_tensor.hpp"
#include "gpu_ops/launch.hpp"

namespace tandem::gpu {
namespace {

/// Of the rows in shared memory: more would not fit the registers.
template <int dim>
constexpr int at_once = dim <= 64 ? 32 : 16;
/// Queries that dk and dv take to shared memory at once, beside the block's keys and values.
constexpr int query_rows = 32;
/// Keys and values that dq takes there at once; those of wide heads beside the block's queries.
template <int dim>
constexpr int key_rows = TensorTiling<dim>::wide ? 32 : 64;

/// A number of each of this thread's two rows.
struct OfRows {
  float x[2];
};

/// Weight of a key that a query sees: `scale` and `lse` are those of powers of two.
TANDEM_DEVICE float power_of(float product, float lse, float scale) {
  return exp2_estimate(numerics::fma(scale, product, -lse));
}

/// From products of own queries with keys from `first` on, and the gradients of their weights, to those of scores but
/// for their scale.
template <bool masked, int columns>
TANDEM_DEVICE void to_dscores(Products<columns>& dweights, const Products<columns>& products, const OfRows& lse,
                              const OfRows& delta, int first, const Band& band, float scale) {
  TANDEM_UNROLL
  for (int j = 0; j < columns / 8; ++j) {
    for (int e = 0; e < 4; ++e) {
      const bool seen = !masked || sees(band, own_row(e / 2), first + own_column(j, e));
      const float weight = seen ? power_of(products.at[j].x[e], lse.x[e / 2], scale) : 0.0F;
      float& x = dweights.at[j].x[e];
      x = unscaled_dscore(weight, x, delta.x[e / 2]);
    }
  }
}

/// Adds to dq what comes of `at_once` keys from `first` on.
template <bool masked, int dim, class Factors>
TANDEM_DEVICE void take_keys(Products<dim>& sums, const Factors& queries, const Factors& douts, bf16* keys,
                             bf16* values, const OfRows& lse, const OfRows& delta, int first, const Band& band,
                             float scale) {
  const auto products = with_rows<at_once<dim>, dim>(queries, keys, first);
  auto dscores = with_rows<at_once<dim>, dim>(douts, values, first);
  to_dscores<masked>(dscores, products, lse, delta, first, band, scale);
  add_weighted(sums, dscores, keys, first);
}

template <int dim>
TANDEM_KERNEL_BY(TensorTiling<dim>::threads, TensorTiling<dim>::blocks)
tensor_dq_kernel(BackwardOperands operands, AttentionShape shape, std::int64_t first_tile, bool aligned) {
  using Size = TensorTiling<dim>;
  constexpr int own_tile = Size::rows * dim;
  TANDEM_DYNAMIC_SHARED(bf16, memory);
  bf16* const keys = memory + (Size::wide ? 2 * own_tile : 0);
  bf16* const values = keys + key_rows<dim> * dim;
  const TileOf tile = queries_of(first_tile + block_index(), Size::rows, shape);
  const std::int64_t group = shape.heads / shape.kv_heads;
  const HeadPair others = pair_at(operands.k, operands.v, shape, tile.b, tile.h / group);
  const HeadPair own = pair_at(operands.q, operands.dout, shape, tile.b, tile.h);
  stage<dim>(own, tile.first, Size::rows, shape, aligned, memory, memory + own_tile);
  if (!Size::wide) staged();
  const auto queries = own_factors<dim>(memory), douts = own_factors<dim>(memory + own_tile);
  if (!Size::wide) barrier();
  const float scale = in_powers_of_two(shape.scale);
  OfRows lse, delta;
  TANDEM_UNROLL
  for (int half = 0; half < 2; ++half) {
    const std::int64_t t = tile.first + own_row(half);
    const std::int64_t statistic = (tile.b * shape.heads + tile.h) * shape.sequence + t;
    lse.x[half] = t < shape.sequence ? in_powers_of_two(operands.lse[statistic]) : 0.0F;
    delta.x[half] = t < shape.sequence ? operands.delta[statistic] : 0.0F;
  }
  Products<dim> sums = {};
  const std::int64_t end = end_of_keys(tile.first, Size::rows, shape.sequence);
  for (std::int64_t key = first_key_of(tile.first, key_rows<dim>, operands.reach); key < end; key += key_rows<dim>) {
    stage<dim>(others, key, key_rows<dim>, shape, aligned, keys, values);
    staged();
    const Band band = band_of<Size::rows>(tile.first, key, operands.reach);
    for (int first = 0; first < key_rows<dim>; first += at_once<dim>) {
      const RowRange some{first, first + at_once<dim> - 1};
      if (!sees_any(band, own_range(), some)) continue;
      if (sees_all(band, own_range(), some)) {
        take_keys<false>(sums, queries, douts, keys, values, lse, delta, first, band, scale);
      } else {
        take_keys<true>(sums, queries, douts, keys, values, lse, delta, first, band, scale);
      }
    }
    barrier();
  }
  write_own_rows(head_at<bf16>(operands.dq, shape, tile.b, tile.h), tile.first, shape, aligned, sums,
                 {shape.scale, shape.scale}, memory);
}

/// The queries that a block of keys has in shared memory.
struct StagedQueries {
  bf16 *rows, *douts;
  float *lse, *delta;  ///< `query_rows` of each; lse in powers of two
};
/// From query `first` of head h on.
template <int dim, int threads>
TANDEM_DEVICE void stage_queries(const BackwardOperands& operands, std::int64_t b, std::int64_t h, std::int64_t first,
                                 const AttentionShape& shape, bool aligned, const StagedQueries& to) {
  const HeadPair heads = pair_at(operands.q, operands.dout, shape, b, h);
  stage<dim, threads>(heads, first, query_rows, shape, aligned, to.rows, to.douts);
  if (thread_index() < query_rows) {  // zeros behind the last token, as its rows: they add nothing
    const std::int64_t t = first + thread_index(), statistics = (b * shape.heads + h) * shape.sequence;
    to.lse[thread_index()] = t < shape.sequence ? in_powers_of_two(operands.lse[statistics + t]) : 0.0F;
    to.delta[thread_index()] = t < shape.sequence ? operands.delta[statistics + t] : 0.0F;
  }
}

/// From the products of own keys with staged queries from `first` on to their weights.
template <bool masked, int columns>
TANDEM_DEVICE void to_weights(Products<columns>& products, const StagedQueries& queries, int first, const Band& band,
                              float scale) {
  TANDEM_UNROLL
  for (int j = 0; j < columns / 8; ++j) {
    for (int e = 0; e < 4; ++e) {
      const int column = first + own_column(j, e);
      const bool seen = !masked || sees(band, column, own_row(e / 2));
      products.at[j].x[e] = seen ? power_of(products.at[j].x[e], queries.lse[column], scale) : 0.0F;
    }
  }
}
/// From the gradients of weights to those of scores, but for their scale.
template <int columns>
TANDEM_DEVICE void to_dscores(Products<columns>& dweights, const Products<columns>& weights,
                              const StagedQueries& queries, int first) {
  TANDEM_UNROLL
  for (int j = 0; j < columns / 8; ++j) {
    for (int e = 0; e < 4; ++e) {
      float& x = dweights.at[j].x[e];
      x = unscaled_dscore(weights.at[j].x[e], x, queries.delta[first + own_column(j, e)]);
    }
  }
}

/// A block of keys, its rows in shared memory.
struct StagedKeys {
  bf16 *keys, *values;
};

/// This warp's rows of dk and dv.
template <int dim>
struct BothGradients {
  static constexpr int threads = TensorTiling<dim>::threads;
  static constexpr int products = 4;  ///< of a key with a query

  /// Of `at_once` queries from `first` on.
  template <bool masked>
  TANDEM_DEVICE void add(const StagedKeys& own, const StagedQueries& queries, int first, const Band& band,
                         float scale) {
    auto weights = with_rows<at_once<dim>, dim>(own.keys, queries.rows, first);
    to_weights<masked>(weights, queries, first, band, scale);
    add_weighted(dv, weights, queries.douts, first);
    auto dscores = with_rows<at_once<dim>, dim>(own.values, queries.douts, first);
    to_dscores(dscores, weights, queries, first);
    add_weighted(dk, dscores, queries.rows, first);
  }
  TANDEM_DEVICE void write(const HeadPair& to, std::int64_t first, const AttentionShape& shape, bool aligned,
                           const StagedKeys& through) const {
    write_own_rows(to.a, first, shape, aligned, dk, {shape.scale, shape.scale}, through.keys);
    write_own_rows(to.b, first, shape, aligned, dv, {1.0F, 1.0F}, through.values);
  }

  Products<dim> dk = {}, dv = {};
};

/// The same of wide heads, of which a thread has room for one gradient: four warps make dv, and four more dk of the
/// same rows.
template <int dim>
struct OneGradient {
  static constexpr int threads = 2 * TensorTiling<dim>::threads;
  static constexpr int products = 5;

  template <bool masked>
  TANDEM_DEVICE void add(const StagedKeys& own, const StagedQueries& queries, int first, const Band& band,
                         float scale) {
    auto factors = with_rows<at_once<dim>, dim>(own.keys, queries.rows, first);
    to_weights<masked>(factors, queries, first, band, scale);
    if (!of_values) {
      auto dscores = with_rows<at_once<dim>, dim>(own.values, queries.douts, first);
      to_dscores(dscores, factors, queries, first);
      factors = dscores;
    }
    add_weighted(sums, factors, of_values ? queries.douts : queries.rows, first);
  }
  TANDEM_DEVICE void write(const HeadPair& to, std::int64_t first, const AttentionShape& shape, bool aligned,
                           const StagedKeys& through) const {
    Head<bf16> gradient = to.a;
    if (of_values) gradient = to.b;  // either by reference would be in memory
    const float factor = of_values ? 1.0F : shape.scale;
    write_own_rows(gradient, first, shape, aligned, sums, {factor, factor}, of_values ? through.values : through.keys);
  }

  const bool of_values = thread_index() < TensorTiling<dim>::threads;
  Products<dim> sums = {};
};

template <int dim>
using KeyGradients = std::conditional_t<TensorTiling<dim>::wide, OneGradient<dim>, BothGradients<dim>>;

template <int dim>
TANDEM_KERNEL_BY(KeyGradients<dim>::threads, TensorTiling<dim>::blocks)
tensor_dkv_kernel(BackwardOperands operands, AttentionShape shape, std::int64_t first_tile, bool aligned) {
  using Size = TensorTiling<dim>;
  constexpr int threads = KeyGradients<dim>::threads;
  TANDEM_DYNAMIC_SHARED(bf16, memory);
  TANDEM_SHARED(float, lse, query_rows);
  TANDEM_SHARED(float, delta, query_rows);
  const StagedKeys own{memory, memory + Size::rows * dim};
  const StagedQueries queries{own.values + Size::rows * dim, own.values + (Size::rows + query_rows) * dim, lse, delta};
  const TileOf tile = keys_of(first_tile + block_index(), Size::rows, shape);
  const std::int64_t end = end_of_queries(tile.first, Size::rows, operands.reach, shape.sequence);
  const std::int64_t group = shape.heads / shape.kv_heads;
  stage<dim, threads>(pair_at(operands.k, operands.v, shape, tile.b, tile.h), tile.first, Size::rows, shape, aligned,
                      own.keys, own.values);
  const float scale = in_powers_of_two(shape.scale);
  KeyGradients<dim> gradients;
  for (std::int64_t h = tile.h * group; h < (tile.h + 1) * group; ++h) {
    for (std::int64_t query = tile.first; query < end; query += query_rows) {
      stage_queries<dim, threads>(operands, tile.b, h, query, shape, aligned, queries);
      staged();
      const Band band = band_of<Size::rows>(query, tile.first, operands.reach);
      for (int first = 0; first < query_rows; first += at_once<dim>) {
        const RowRange some{first, first + at_once<dim> - 1};
        if (!sees_any(band, some, own_range())) continue;
        if (sees_all(band, some, own_range())) {
          gradients.template add<false>(own, queries, first, band, scale);
        } else {
          gradients.template add<true>(own, queries, first, band, scale);
        }
      }
      barrier();
    }
  }
  gradients.write(pair_at(operands.dk, operands.dv, shape, tile.b, tile.h), tile.first, shape, aligned, own);
}

}  // namespace

void tensor_attention_backward(const BackwardOperands& o, const AttentionShape& shape, const AttentionLimits& limits,
                               CUstream_st* stream) {
  const bool aligned = aligned_heads<bf16>(shape.head_dim, o.dout, o.q, o.k, o.v, o.dq, o.dk, o.dv);
  with_tensor_tiling(shape.head_dim, [&]<int dim>(TensorTiling<dim>) {
    using Size = TensorTiling<dim>;
    constexpr std::size_t row = dim * sizeof(bf16);
    const int own = Size::wide ? 2 * Size::rows : 0;  // rows in shared memory that are in registers elsewhere
    const TileWork queries{shape.batch * shape.heads, 3.0, (own + 2 * key_rows<dim>) * row};
    in_launches<Size>(queries, shape, limits, [&](std::int64_t first_tile, const Geometry& geometry) {
      launch("attention_dq", tensor_dq_kernel<dim>, geometry, stream, o, shape, first_tile, aligned);
    });
    const auto products = static_cast<double>(KeyGradients<dim>::products * (shape.heads / shape.kv_heads));
    const TileWork keys{shape.batch * shape.kv_heads, products, 2 * (Size::rows + query_rows) * row};
    in_launches<Size>(keys, shape, limits, [&](std::int64_t first_tile, Geometry geometry) {
      geometry.block = KeyGradients<dim>::threads;
      launch("attention_dkv", tensor_dkv_kernel<dim>, geometry, stream, o, shape, first_tile, aligned);
    });
  });
}

}  // namespace tandem::gpu
