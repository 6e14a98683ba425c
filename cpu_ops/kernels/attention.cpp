// Blockwise causal attention (Dao et al., arXiv 2205.14135): a block of queries against blocks of keys with
// a running maximum and sum, so that no T x T matrix ever exists. Every sum has one owner and a fixed order.
#include <algorithm>
#include <cmath>
#include <limits>

#include "core/numerics/functions.hpp"
#include "cpu_ops/kernels/elements.hpp"
#include "cpu_ops/kernels/gemm.hpp"
#include "cpu_ops/kernels/kernels.hpp"
#include "cpu_ops/kernels/lane_sums.hpp"

namespace tandem::fast {
namespace {

/// Queries, and keys, of one block.
constexpr std::int64_t block = 64;

std::int64_t block_of(std::int64_t sequence) { return std::min(block, sequence); }

/// One head of one batch entry: (T, D), rows `stride` apart.
template <class T>
struct Head {
  T* data;
  std::int64_t stride;
  T* row(std::int64_t t) const { return data + t * stride; }
};

template <class T>
Head<T> head_of(const HeadsView& view, const AttentionShape& shape, std::int64_t b, std::int64_t h) {
  return {static_cast<T*>(view.data) + b * shape.sequence * view.row_stride + h * shape.head_dim, view.row_stride};
}

template <class T>
Head<T> head_of(const TensorView& dense, const AttentionShape& shape, std::int64_t b, std::int64_t h) {
  return head_of<T>(HeadsView{dense.data, dense.dtype, shape.heads * shape.head_dim}, shape, b, h);
}

/// Some queries of one record: [begin, begin + rows) of the row, a whole number of blocks behind the record's first.
struct QueryBlock {
  std::int64_t record, begin, rows;
};

/// Calls `use` with the blocks of `n` queries, or what is left of a record, that begin among tokens [begin, begin + n)
/// of row b. A record is cut as it would be in a row of its own: the same sums in the same order.
template <class Use>
void for_blocks_from(std::int64_t begin, std::int64_t n, std::int64_t b, const AttentionShape& shape, const Use& use) {
  const std::int64_t end = std::min(begin + n, shape.sequence);
  if (!shape.records) return use(QueryBlock{0, begin, end - begin});
  const std::int32_t *const first = shape.records.first + b * shape.sequence, *const last = shape.records.end +
                                                                                            b * shape.sequence;
  for (std::int64_t t = begin; t < end;) {
    const std::int64_t record = first[t], within = (t - record) % n;
    const std::int64_t next = std::min<std::int64_t>(last[t], t + n - within);
    if (within == 0) use(QueryBlock{record, t, next - t});
    t = next;
  }
}

/// First key, a whole number of blocks of `n` behind the record's first, that any query of a block sees.
std::int64_t first_key(const QueryBlock& queries, std::int64_t n, const AttentionShape& shape) {
  return queries.record + std::max<std::int64_t>(0, queries.begin - queries.record + 1 - shape.reach()) / n * n;
}

/// Calls `use(key, keys)` with the first and the number of the keys of each block of `n` that any query sees, in order.
template <class Use>
void for_keys_of(const QueryBlock& queries, std::int64_t n, const AttentionShape& shape, const Use& use) {
  for (std::int64_t key = first_key(queries, n, shape); key <= queries.begin; key += n) {
    use(key, key == queries.begin ? queries.rows : n);
  }
}

/// The keys of a block that each query of another sees.
struct Band {
  std::int64_t ahead;  ///< distance from the first key to the first query, in tokens
  std::int64_t reach;  ///< keys that a query sees, itself among them
  std::int64_t keys;   ///< number of keys in the block

  std::int64_t first(std::int64_t query) const { return std::clamp<std::int64_t>(ahead + query + 1 - reach, 0, keys); }
  std::int64_t end(std::int64_t query) const { return std::min(keys, ahead + query + 1); }
};

/// Keys out of sight weigh exp(-inf) = 0: whole vectors are cheaper than rows of every length.
inline void hide_unseen(float* scores, std::int64_t query, const Band& band) {
  constexpr float nothing = -std::numeric_limits<float>::infinity();
  const std::int64_t first = band.first(query), end = band.end(query);
  for (std::int64_t j = 0; j < first; ++j) scores[j] = nothing;
  for (std::int64_t j = end; j < band.keys; ++j) scores[j] = nothing;
}

/// Running softmax of a block of queries.
struct Softmax {
  float* scores;   ///< (rows, keys), becomes probabilities relative to the running maximum
  float* largest;  ///< (rows)
  float* sum;      ///< (rows)
  float* out;      ///< (rows, dim), sum of probabilities times values so far
  std::int64_t rows, dim;
  Band band;
  bool first;  ///< nothing has been summed yet
};

void softmax_block(Softmax s) {
  vectorised([=] {
    const std::int64_t keys = s.band.keys;
    // A number, so that -inf less this is -inf too: a query may see no key of its first block.
    constexpr float lowest = std::numeric_limits<float>::lowest();
    for (std::int64_t i = 0; i < s.rows; ++i) {
      float* const x = s.scores + i * keys;
      hide_unseen(x, i, s.band);
      const float before = s.first ? lowest : s.largest[i];
      const float top = lane_max(keys, before, [=](std::int64_t j) { return x[j]; });
#pragma GCC ivdep
      for (std::int64_t j = 0; j < keys; ++j) x[j] = numerics::exp(x[j] - top);
      const float sum = lane_sum(keys, [=](std::int64_t j) { return x[j]; });
      s.largest[i] = top;
      if (s.first) {
        s.sum[i] = sum;
        continue;
      }
      const float shrink = numerics::exp(before - top);
      s.sum[i] = numerics::fma(s.sum[i], shrink, sum);
      float* const o = s.out + i * s.dim;
#pragma GCC ivdep
      for (std::int64_t d = 0; d < s.dim; ++d) o[d] = o[d] * shrink;
    }
  });
}

template <class T>
void write_queries(const float* from, const float* sum, std::int64_t rows, std::int64_t dim, Head<T> to) {
  vectorised([=] {
    for (std::int64_t i = 0; i < rows; ++i) {
      const float inverse = 1.0F / sum[i];
      T* const target = to.row(i);
#pragma GCC ivdep
      for (std::int64_t d = 0; d < dim; ++d) target[d] = from_float<T>(from[i * dim + d] * inverse);
    }
  });
}

struct ForwardBuffers {
  ForwardBuffers(Scratch scratch, std::int64_t n, std::int64_t dim)
      : queries(scratch.floats(n * dim)),
        keys(scratch.floats(n * dim)),
        values(scratch.floats(n * dim)),
        out(scratch.floats(n * dim)),
        scores(scratch.floats(n * n)),
        largest(scratch.floats(n)),
        sum(scratch.floats(n)) {}
  static std::size_t bytes(std::int64_t n, std::int64_t dim) {
    return 4 * Scratch::bytes_of(n * dim) + Scratch::bytes_of(n * n) + 2 * Scratch::bytes_of(n);
  }
  float *queries, *keys, *values, *out, *scores, *largest, *sum;
};

template <class T>
struct ForwardHead {
  Head<T> q, k, v, out;
  float* lse;  ///< (T) or null
};

/// A block of queries of one head.
template <class T>
void forward_block(const ForwardHead<T>& head, const QueryBlock& queries, const AttentionShape& shape,
                   const ForwardBuffers& buffer) {
  const std::int64_t begin = queries.begin, rows = queries.rows;
  const std::int64_t dim = shape.head_dim, n = block_of(shape.sequence);
  const FloatBlock q = as_floats(head.q.row(begin), head.q.stride, rows, dim, buffer.queries);
  bool first = true;
  for_keys_of(queries, n, shape, [&](std::int64_t key, std::int64_t keys) {
    const FloatBlock k = as_floats(head.k.row(key), head.k.stride, keys, dim, buffer.keys);
    const FloatBlock v = as_floats(head.v.row(key), head.v.stride, keys, dim, buffer.values);
    gemm(Op::plain, Op::transposed, rows, keys, dim, shape.scale, q.data, q.stride, k.data, k.stride, 0.0F,
         buffer.scores, keys);
    const Band band{begin - key, shape.reach(), keys};
    softmax_block({buffer.scores, buffer.largest, buffer.sum, buffer.out, rows, dim, band, first});
    gemm(Op::plain, Op::plain, rows, dim, keys, 1.0F, buffer.scores, keys, v.data, v.stride, first ? 0.0F : 1.0F,
         buffer.out, dim);
    first = false;
  });
  write_queries(buffer.out, buffer.sum, rows, dim, Head<T>{head.out.row(begin), head.out.stride});
  for (std::int64_t i = 0; head.lse != nullptr && i < rows; ++i) {
    head.lse[begin + i] =
        static_cast<float>(static_cast<double>(buffer.largest[i]) + std::log(static_cast<double>(buffer.sum[i])));
  }
}

struct BackwardBuffers {
  BackwardBuffers(Scratch scratch, std::int64_t sequence, std::int64_t n, std::int64_t dim)
      : keys(scratch.floats(sequence * dim)),
        values(scratch.floats(sequence * dim)),
        dkeys(scratch.floats(sequence * dim)),
        dvalues(scratch.floats(sequence * dim)),
        queries(scratch.floats(n * dim)),
        dout(scratch.floats(n * dim)),
        dqueries(scratch.floats(n * dim)),
        probabilities(scratch.floats(n * n)),
        dscores(scratch.floats(n * n)),
        delta(scratch.floats(n)) {}
  static std::size_t bytes(std::int64_t sequence, std::int64_t n, std::int64_t dim) {
    return 4 * Scratch::bytes_of(sequence * dim) + 3 * Scratch::bytes_of(n * dim) + 2 * Scratch::bytes_of(n * n) +
           Scratch::bytes_of(n);
  }
  float *keys, *values, *dkeys, *dvalues, *queries, *dout, *dqueries, *probabilities, *dscores, *delta;
};

/// delta[i] = dout_i . out_i, which is the sum over keys of P dP.
template <class T>
void row_products(const FloatBlock& dout, Head<T> out, std::int64_t rows, std::int64_t dim, float* delta) {
  vectorised([=] {
    for (std::int64_t i = 0; i < rows; ++i) {
      const float* const d = dout.data + i * dout.stride;
      const T* const o = out.row(i);
      delta[i] = lane_sum(dim, [=](std::int64_t c) { return d[c] * to_float(o[c]); });
    }
  });
}

/// scores -> probabilities, dP -> scale dS, in place.
void softmax_gradient_block(float* scores, float* dscores, const float* lse, const float* delta, float scale,
                            std::int64_t rows, Band band) {
  vectorised([=] {
    for (std::int64_t i = 0; i < rows; ++i) {
      float* const p = scores + i * band.keys;
      float* const d = dscores + i * band.keys;
      hide_unseen(p, i, band);
      const float log_sum = lse[i], own = delta[i];
#pragma GCC ivdep
      for (std::int64_t j = 0; j < band.keys; ++j) {
        p[j] = numerics::exp(p[j] - log_sum);
        d[j] = p[j] * (d[j] - own) * scale;
      }
    }
  });
}

template <class T>
struct BackwardHead {
  Head<T> q, out, dout, dq;
  const float* lse;  ///< (T)
};

/// A block of queries of one query head: writes their dq, adds to the dk and dv of all keys they see.
template <class T>
void backward_block(const BackwardHead<T>& head, const FloatBlock& keys, const FloatBlock& values,
                    const QueryBlock& queries, const AttentionShape& shape, const BackwardBuffers& buffer) {
  const std::int64_t begin = queries.begin, rows = queries.rows;
  const std::int64_t dim = shape.head_dim, n = block_of(shape.sequence);
  const FloatBlock q = as_floats(head.q.row(begin), head.q.stride, rows, dim, buffer.queries);
  const FloatBlock dout = as_floats(head.dout.row(begin), head.dout.stride, rows, dim, buffer.dout);
  row_products(dout, Head<T>{head.out.row(begin), head.out.stride}, rows, dim, buffer.delta);
  bool first = true;
  for_keys_of(queries, n, shape, [&](std::int64_t key, std::int64_t width) {
    const float* const k = keys.data + key * keys.stride;
    const float* const v = values.data + key * values.stride;
    gemm(Op::plain, Op::transposed, rows, width, dim, shape.scale, q.data, q.stride, k, keys.stride, 0.0F,
         buffer.probabilities, width);
    gemm(Op::plain, Op::transposed, rows, width, dim, 1.0F, dout.data, dout.stride, v, values.stride, 0.0F,
         buffer.dscores, width);
    softmax_gradient_block(buffer.probabilities, buffer.dscores, head.lse + begin, buffer.delta, shape.scale, rows,
                           {begin - key, shape.reach(), width});
    gemm(Op::transposed, Op::plain, width, dim, rows, 1.0F, buffer.probabilities, width, dout.data, dout.stride, 1.0F,
         buffer.dvalues + key * dim, dim);
    gemm(Op::transposed, Op::plain, width, dim, rows, 1.0F, buffer.dscores, width, q.data, q.stride, 1.0F,
         buffer.dkeys + key * dim, dim);
    gemm(Op::plain, Op::plain, rows, dim, width, 1.0F, buffer.dscores, width, k, keys.stride, first ? 0.0F : 1.0F,
         buffer.dqueries, dim);
    first = false;
  });
  store_block(buffer.dqueries, rows, dim, head.dq.row(begin), head.dq.stride);
}

}  // namespace

std::int64_t attention_scores(const AttentionShape& shape) {
  const std::int64_t n = block_of(shape.sequence);
  std::int64_t scores = 0;
  for (std::int64_t b = 0; b < shape.batch; ++b) {
    for (std::int64_t begin = 0; begin < shape.sequence; begin += n) {
      for_blocks_from(begin, n, b, shape, [&](const QueryBlock& queries) {
        for_keys_of(queries, n, shape, [&](std::int64_t, std::int64_t keys) { scores += queries.rows * keys; });
      });
    }
  }
  return scores;
}

std::size_t attention_scratch(std::int64_t sequence, std::int64_t head_dim, int threads) {
  return static_cast<std::size_t>(threads) * ForwardBuffers::bytes(block_of(sequence), head_dim);
}

std::size_t attention_backward_scratch(std::int64_t sequence, std::int64_t head_dim, int threads) {
  return static_cast<std::size_t>(threads) * BackwardBuffers::bytes(sequence, block_of(sequence), head_dim);
}

void attention(Parallel& parallel, const Workspace& workspace, HeadsView q, HeadsView k, HeadsView v, TensorView out,
               TensorView lse, const AttentionShape& shape) {
  const std::int64_t n = block_of(shape.sequence), blocks = (shape.sequence + n - 1) / n;
  const std::int64_t group = shape.group(), all_heads = shape.batch * shape.heads;
  const std::size_t bytes = ForwardBuffers::bytes(n, shape.head_dim);
  with_activation(q.dtype, [&]<class T>(T) {
    for_tiles(parallel, all_heads * blocks, workspace, bytes, [&](std::int64_t tile, Scratch scratch) {
      // The longest rows first, so that the last tiles are short ones.
      const std::int64_t begin = (blocks - 1 - tile / all_heads) * n;
      const std::int64_t b = tile % all_heads / shape.heads, h = tile % shape.heads;
      const ForwardHead<T> head{head_of<T>(q, shape, b, h), head_of<T>(k, shape, b, h / group),
                                head_of<T>(v, shape, b, h / group), head_of<T>(out, shape, b, h),
                                lse ? lse.as<float>() + (b * shape.heads + h) * shape.sequence : nullptr};
      const ForwardBuffers buffer(scratch, n, shape.head_dim);
      for_blocks_from(begin, n, b, shape,
                      [&](const QueryBlock& queries) { forward_block(head, queries, shape, buffer); });
    });
  });
}

void attention_backward(Parallel& parallel, const Workspace& workspace, TensorView dout, HeadsView q, HeadsView k,
                        HeadsView v, TensorView out, TensorView lse, HeadsView dq, HeadsView dk, HeadsView dv,
                        const AttentionShape& shape) {
  const std::int64_t length = shape.sequence, n = block_of(length), dim = shape.head_dim;
  const std::int64_t group = shape.group();
  const std::size_t bytes = BackwardBuffers::bytes(length, n, dim);
  with_activation(q.dtype, [&]<class T>(T) {
    // One task owns a key head with all its query heads: nobody else adds to its dk and dv.
    for_tiles(parallel, shape.batch * shape.kv_heads, workspace, bytes, [&](std::int64_t tile, Scratch scratch) {
      const BackwardBuffers buffer(scratch, length, n, dim);
      const std::int64_t b = tile / shape.kv_heads, key_head = tile % shape.kv_heads;
      const Head<T> k_head = head_of<T>(k, shape, b, key_head), v_head = head_of<T>(v, shape, b, key_head);
      const FloatBlock keys = as_floats(k_head.data, k_head.stride, length, dim, buffer.keys);
      const FloatBlock values = as_floats(v_head.data, v_head.stride, length, dim, buffer.values);
      std::fill_n(buffer.dkeys, length * dim, 0.0F);
      std::fill_n(buffer.dvalues, length * dim, 0.0F);
      for (std::int64_t h = key_head * group; h < (key_head + 1) * group; ++h) {
        const BackwardHead<T> head{head_of<T>(q, shape, b, h), head_of<T>(out, shape, b, h),
                                   head_of<T>(dout, shape, b, h), head_of<T>(dq, shape, b, h),
                                   lse.as<float>() + (b * shape.heads + h) * length};
        for (std::int64_t begin = 0; begin < length; begin += n) {
          for_blocks_from(begin, n, b, shape, [&](const QueryBlock& queries) {
            backward_block(head, keys, values, queries, shape, buffer);
          });
        }
      }
      const Head<T> dk_head = head_of<T>(dk, shape, b, key_head), dv_head = head_of<T>(dv, shape, b, key_head);
      store_block(buffer.dkeys, length, dim, dk_head.data, dk_head.stride);
      store_block(buffer.dvalues, length, dim, dv_head.data, dv_head.stride);
    });
  });
}

}  // namespace tandem::fast
