// Attention backward on tensor cores, in two kernels as in attention_backward.cu: of dq, and of dk and dv.
#include <type_traits>

#include "gpu_ops/base/launch.hpp"
#include "gpu_ops/kernels/attention_tensor.hpp"

namespace tandem::gpu {
namespace {

/// Rows in shared memory that a product takes at once: more would not fit the registers.
template <int dim>
constexpr int at_once = dim <= 64 ? 32 : 16;
/// Queries of a buffer in shared memory, where dk and dv have them beside the block's keys and values.
template <int dim>
constexpr int query_rows = dim <= 64                 ? 64
                           : TensorTiling<dim>::wide ? 32
                                                     : 16;
/// Keys and values of a buffer, where dq has them; those of wide heads beside the block's queries.
template <int dim>
constexpr int key_rows = dim <= 64 ? 64 : 32;

/// A number of each of two rows.
struct OfRows {
  float x[2];
};

/// Turns products of own queries with keys, and the gradients of their weights, into gradients of scores, but for their
/// scale.
template <int columns>
TANDEM_DEVICE void to_dscores(Products<columns>& dweights, const Products<columns>& products, const OfRows& lse,
                              const OfRows& delta, const ScoreScale& scale) {
  TANDEM_UNROLL
  for (int j = 0; j < columns / 8; ++j) {
    for (int e = 0; e < 4; ++e) {
      float& x = dweights.at[j].x[e];
      x = unscaled_dscore(power_of(products.at[j].x[e], lse.x[e / 2], scale), x, delta.x[e / 2]);
    }
  }
}

template <int dim>
TANDEM_KERNEL_BY(TensorTiling<dim>::threads, TensorTiling<dim>::blocks)
tensor_dq_kernel(BackwardOperands operands, AttentionShape shape, std::int64_t first_tile, bool aligned) {
  using Size = TensorTiling<dim>;
  constexpr int own_tile = Size::rows * dim, buffer = 2 * key_rows<dim> * dim;
  constexpr bool beside = !Size::wide && buffer >= 2 * own_tile;  // own rows lie where the second keys will
  TANDEM_DYNAMIC_SHARED(bf16, memory);
  bf16* const tiles = memory + (Size::wide ? 2 * own_tile : 0);
  bf16* const own = memory + (beside ? buffer : 0);
  const TileOf tile = queries_of(first_tile + block_index(), Size::rows, shape);
  const std::int64_t group = shape.group();
  const HeadPair others = pair_at(operands.k, operands.v, shape, tile.b, tile.h / group);
  const std::int64_t begin = first_key_of(tile, key_rows<dim>, shape, operands.reach);
  const auto copy = [&](int i, int to) {
    bf16* const keys = tiles + to * buffer;
    stage<dim>(others, begin + i * key_rows<dim>, key_rows<dim>, shape, aligned, keys, keys + buffer / 2);
  };
  stage<dim>(pair_at(operands.q, operands.dout, shape, tile.b, tile.h), tile.first, Size::rows, shape, aligned, own,
             own + own_tile);
  if (beside) copy(0, 0);
  if (!Size::wide) staged();
  const auto queries = own_factors<dim>(own), douts = own_factors<dim>(own + own_tile);
  if (!Size::wide && !beside) {
    barrier();
    copy(0, 0);
  }
  const ScoreScale scale = score_scale(shape.scale);
  const OwnSeen seen =
      own_seen(tile.first, [&](std::int64_t t) { return keys_seen(tile.b, t, shape, operands.reach); });
  OfRows lse, delta;
  TANDEM_UNROLL
  for (int half = 0; half < 2; ++half) {
    const std::int64_t t = tile.first + own_row(half);
    const std::int64_t statistic = (tile.b * shape.heads + tile.h) * shape.sequence + t;
    lse.x[half] = t < shape.sequence ? in_powers_of_two(operands.lse[statistic]) : 0.0F;
    delta.x[half] = t < shape.sequence ? operands.delta[statistic] : 0.0F;
  }
  Products<dim> sums = {};
  const int count = tiles_between(begin, end_of_keys(tile.first, Size::rows, shape.sequence), key_rows<dim>);
  const int free = for_tiles<Size::buffers>(count, copy, [&](int i, int from) {
    bf16* const keys = tiles + from * buffer;  // and the values behind them
    const int first_key = static_cast<int>(begin) + i * key_rows<dim>;
    TANDEM_UNROLL
    for (int first = 0; first < key_rows<dim>; first += at_once<dim>) {
      if (!sees_any(seen.warp, {first_key + first, first_key + first + at_once<dim> - 1})) continue;
      auto products = with_rows<at_once<dim>, dim>(queries, keys, first);
      sign_and_hide(products, scale.negative, seen, first_key + first);
      auto dscores = with_rows<at_once<dim>, dim>(douts, keys, key_rows<dim> + first);
      to_dscores(dscores, products, lse, delta, scale);
      add_weighted(sums, dscores, keys, first);
    }
  });
  write_own_rows(head_at<bf16>(operands.dq, shape, tile.b, tile.h), tile.first, shape, aligned, sums,
                 {shape.scale, shape.scale}, Size::wide ? own : tiles + free * buffer);
}

/// A buffer of queries that a block of keys has in shared memory: `query_rows`, as many of dout, and then statistics of
/// these. All from one address.
template <int dim>
struct StagedQueries {
  static constexpr int rows = query_rows<dim>;
  static constexpr int elements = 2 * rows * dim + 2 * rows * static_cast<int>(sizeof(float) / sizeof(bf16));

  TANDEM_DEVICE float* lse() const { return reinterpret_cast<float*>(tile + 2 * rows * dim); }
  TANDEM_DEVICE float* delta() const { return lse() + rows; }

  bf16* tile;
};
/// Stages queries of head h from query `first` on.
template <int dim, int threads>
TANDEM_DEVICE void stage_queries(const BackwardOperands& operands, std::int64_t b, std::int64_t h, std::int64_t first,
                                 const AttentionShape& shape, bool aligned, const StagedQueries<dim>& to) {
  const HeadPair heads = pair_at(operands.q, operands.dout, shape, b, h);
  stage<dim, threads>(heads, first, query_rows<dim>, shape, aligned, to.tile, to.tile + query_rows<dim> * dim);
  if (thread_index() < query_rows<dim>) {
    const std::int64_t of_head = (b * shape.heads + h) * shape.sequence, t = first + thread_index();
    float *const lse = to.lse() + thread_index(), *const delta = to.delta() + thread_index();
    if (t < shape.sequence) {
      start_word_copy(lse, operands.lse + of_head + t);
      start_word_copy(delta, operands.delta + of_head + t);
    } else {  // zeros, as the rows behind the last token: they add nothing
      *lse = 0.0F;
      *delta = 0.0F;
    }
  }
}

/// Statistics of two neighbouring queries, the first of which is even.
TANDEM_DEVICE OfRows pair_of(const float* statistics, int at) {
  const TwoWords pair = load_two_words(statistics + at);
  return {{numerics::bits_float(pair.word[0]), numerics::bits_float(pair.word[1])}};
}

/// Some of the staged queries.
struct SomeQueries {
  int first;     ///< row of the buffer
  int position;  ///< position of that row's query in the sequence
};

/// Turns the products of own keys with staged queries from `some` on into weights.
template <int dim, int columns>
TANDEM_DEVICE void to_weights(Products<columns>& products, const StagedQueries<dim>& queries, const SomeQueries& some,
                              const OwnSeen& seen, const ScoreScale& scale) {
  sign_and_hide(products, scale.negative, seen, some.position);
  TANDEM_UNROLL
  for (int j = 0; j < columns / 8; ++j) {
    const OfRows lse = pair_of(queries.lse(), some.first + own_column(j, 0));
    for (int e = 0; e < 4; ++e) {
      products.at[j].x[e] = power_of(products.at[j].x[e], in_powers_of_two(lse.x[e % 2]), scale);
    }
  }
}
/// Turns gradients of weights into those of scores, but for their scale.
template <int dim, int columns>
TANDEM_DEVICE void to_dscores(Products<columns>& dweights, const Products<columns>& weights,
                              const StagedQueries<dim>& queries, int first) {
  TANDEM_UNROLL
  for (int j = 0; j < columns / 8; ++j) {
    const OfRows delta = pair_of(queries.delta(), first + own_column(j, 0));
    for (int e = 0; e < 4; ++e) {
      float& x = dweights.at[j].x[e];
      x = unscaled_dscore(weights.at[j].x[e], x, delta.x[e % 2]);
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
  static constexpr int products = 4;  ///< products of a key with a query

  /// Adds the gradients from `at_once` queries from `some` on.
  TANDEM_DEVICE void add(const StagedKeys& own, const StagedQueries<dim>& queries, const SomeQueries& some,
                         const OwnSeen& seen, const ScoreScale& scale) {
    const int first = some.first;
    auto weights = with_rows<at_once<dim>, dim>(own.keys, queries.tile, first);
    to_weights(weights, queries, some, seen, scale);
    add_weighted(dv, weights, queries.tile, query_rows<dim> + first);
    auto dscores = with_rows<at_once<dim>, dim>(own.values, queries.tile, query_rows<dim> + first);
    to_dscores(dscores, weights, queries, first);
    add_weighted(dk, dscores, queries.tile, first);
  }
  TANDEM_DEVICE void write(const HeadPair& to, std::int64_t first, const AttentionShape& shape, bool aligned,
                           const StagedKeys& through) const {
    warp_barrier();  // a lane overwrites rows that others have named to be read
    write_own_rows(to.a, first, shape, aligned, dk, {shape.scale, shape.scale}, through.keys);
    write_own_rows(to.b, first, shape, aligned, dv, {1.0F, 1.0F}, through.values);
  }

  Products<dim> dk = {}, dv = {};
};

/// Gradients dk and dv of wide heads, where a thread has room for only one: four warps make dv, and four more dk of the
/// same rows.
template <int dim>
struct OneGradient {
  static constexpr int threads = 2 * TensorTiling<dim>::threads;
  static constexpr int products = 5;

  TANDEM_DEVICE void add(const StagedKeys& own, const StagedQueries<dim>& queries, const SomeQueries& some,
                         const OwnSeen& seen, const ScoreScale& scale) {
    const int first = some.first;
    auto factors = with_rows<at_once<dim>, dim>(own.keys, queries.tile, first);
    to_weights(factors, queries, some, seen, scale);
    if (!of_values) {
      auto dscores = with_rows<at_once<dim>, dim>(own.values, queries.tile, query_rows<dim> + first);
      to_dscores(dscores, factors, queries, first);
      factors = dscores;
    }
    add_weighted(sums, factors, queries.tile, of_values ? query_rows<dim> + first : first);
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
  const StagedKeys own{memory, memory + Size::rows * dim};
  const auto queries_in = [&](int i) {
    return StagedQueries<dim>{memory + 2 * Size::rows * dim + i * StagedQueries<dim>::elements};
  };
  const TileOf tile = keys_of(first_tile + block_index(), Size::rows, shape);
  const int group = static_cast<int>(shape.group());
  const std::int64_t end = end_of_queries(tile, Size::rows, shape, operands.reach);
  const int of_head = tiles_between(tile.first, end, query_rows<dim>);
  int next = 0, next_head = 0, now = 0;  // tiles of a head, which follow those of the one before it
  const auto copy = [&](int, int to) {
    stage_queries<dim, threads>(operands, tile.b, tile.h * group + next_head, tile.first + next * query_rows<dim>,
                                shape, aligned, queries_in(to));
    next = next + 1 == of_head ? 0 : next + 1;
    if (next == 0) ++next_head;
  };
  stage<dim, threads>(pair_at(operands.k, operands.v, shape, tile.b, tile.h), tile.first, Size::rows, shape, aligned,
                      own.keys, own.values);
  if (Size::buffers > 1) copy(0, 0);
  const ScoreScale scale = score_scale(shape.scale);
  const OwnSeen seen =
      own_seen(tile.first, [&](std::int64_t t) { return queries_seen(tile.b, t, shape, operands.reach); });
  KeyGradients<dim> gradients;
  for_tiles<Size::buffers>(group * of_head, copy, [&](int, int from) {
    const int position = static_cast<int>(tile.first) + now * query_rows<dim>;
    now = now + 1 == of_head ? 0 : now + 1;
    TANDEM_UNROLL_BY(1)
    for (int first = 0; first < query_rows<dim>; first += at_once<dim>) {
      if (!sees_any(seen.warp, {position + first, position + first + at_once<dim> - 1})) continue;
      gradients.add(own, queries_in(from), {first, position + first}, seen, scale);
    }
  });
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
    const TileWork queries{shape.batch * shape.heads, 3.0, (own + Size::buffers * 2 * key_rows<dim>)*row};
    in_launches<Size>(queries, shape, limits, [&](std::int64_t first_tile, const Geometry& geometry) {
      launch("attention_dq", tensor_dq_kernel<dim>, geometry, stream, o, shape, first_tile, aligned);
    });
    const auto products = static_cast<double>(KeyGradients<dim>::products * shape.group());
    const TileWork keys{shape.batch * shape.kv_heads, products,
                        2 * Size::rows * row + Size::buffers * StagedQueries<dim>::elements * sizeof(bf16)};
    in_launches<Size>(keys, shape, limits, [&](std::int64_t first_tile, Geometry geometry) {
      geometry.block = KeyGradients<dim>::threads;
      launch("attention_dkv", tensor_dkv_kernel<dim>, geometry, stream, o, shape, first_tile, aligned);
    });
  });
}

}  // namespace tandem::gpu
