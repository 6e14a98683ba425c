// Attention of single tokens over keys and values in a cache: a running softmax over blocks of keys, a task for each
// token and head. A token's sums depend on its own sequence alone.
#include <algorithm>
#include <cstring>
#include <limits>

#include "core/numerics/functions.hpp"
#include "cpu_ops/kernels/elements.hpp"
#include "cpu_ops/kernels/kernels.hpp"
#include "cpu_ops/kernels/lane_sums.hpp"

namespace tandem::fast {
namespace {

/// Keys that are weighed together.
constexpr std::int64_t block = 64;

/// One head of one token.
template <class T>
struct Query {
  const T* q;
  const T *keys, *values;  ///< the sequence's, from position 0 on
  std::int64_t stride;     ///< elements between positions
  T* out;
  std::int64_t first, end;  ///< positions that it sees
  std::int64_t dim;
  float scale;
};

/// Scores of `count` keys from position `first` on; returns the largest of them and `before`.
template <class T>
inline float score_keys(const Query<T>& query, std::int64_t first, std::int64_t count, float before, float* scores) {
  const T* const q = query.q;
  for (std::int64_t j = 0; j < count; ++j) {
    const T* const k = query.keys + (first + j) * query.stride;
    scores[j] = query.scale * lane_sum(query.dim, [=](std::int64_t d) { return to_float(q[d]) * to_float(k[d]); });
  }
  return lane_max(count, before, [=](std::int64_t j) { return scores[j]; });
}

template <class T>
void attend(const Query<T>& query, float* scores, float* sums) {
  vectorised([=] {
    const std::int64_t dim = query.dim;
    float largest = std::numeric_limits<float>::lowest(), total = 0.0F;
    std::fill_n(sums, dim, 0.0F);
    for (std::int64_t first = query.first; first < query.end; first += block) {
      const std::int64_t count = std::min(block, query.end - first);
      const float top = score_keys(query, first, count, largest, scores);
#pragma GCC ivdep
      for (std::int64_t j = 0; j < count; ++j) scores[j] = numerics::exp(scores[j] - top);
      const float shrink = numerics::exp(largest - top);
      total = numerics::fma(total, shrink, lane_sum(count, [=](std::int64_t j) { return scores[j]; }));
      largest = top;
#pragma GCC ivdep
      for (std::int64_t d = 0; d < dim; ++d) sums[d] = sums[d] * shrink;
      for (std::int64_t j = 0; j < count; ++j) {
        const T* const v = query.values + (first + j) * query.stride;
        const float weight = scores[j];
#pragma GCC ivdep
        for (std::int64_t d = 0; d < dim; ++d) sums[d] = numerics::fma(weight, to_float(v[d]), sums[d]);
      }
    }
    const float inverse = 1.0F / total;
#pragma GCC ivdep
    for (std::int64_t d = 0; d < dim; ++d) query.out[d] = from_float<T>(sums[d] * inverse);
  });
}

/// Element 0 of a position in a cache of rows.
std::int64_t place_of(const KeyValueCache& cache, const CachedTokens& tokens, std::int64_t n) {
  return (tokens.rows[n] * cache.keys.shape[1] + tokens.position(n)) * cache.keys.shape[2];
}

}  // namespace

std::size_t cached_attention_scratch(std::int64_t head_dim, int threads) {
  return static_cast<std::size_t>(threads) * (Scratch::bytes_of(block) + Scratch::bytes_of(head_dim));
}

void store_keys_values(HeadsView k, HeadsView v, const KeyValueCache& cache, const CachedTokens& tokens,
                       const AttentionShape& shape) {
  const std::size_t element = size_of(k.dtype);
  const std::size_t bytes = static_cast<std::size_t>(cache.keys.shape[2]) * element;
  const auto copy = [&](const TensorView& to, const HeadsView& from, std::int64_t n) {
    std::memcpy(static_cast<std::byte*>(to.data) + static_cast<std::size_t>(place_of(cache, tokens, n)) * element,
                static_cast<const std::byte*>(from.data) + static_cast<std::size_t>(n * from.row_stride) * element,
                bytes);
  };
  for (std::int64_t n = 0; n < shape.sequence; ++n) {
    copy(cache.keys, k, n);
    copy(cache.values, v, n);
  }
}

void cached_attention(Parallel& parallel, const Workspace& workspace, HeadsView q, const KeyValueCache& cache,
                      const CachedTokens& tokens, TensorView out, const AttentionShape& shape) {
  const std::int64_t dim = shape.head_dim, width = cache.keys.shape[2];
  const std::size_t bytes = Scratch::bytes_of(block) + Scratch::bytes_of(dim);
  with_activation(q.dtype, [&]<class T>(T) {
    for_tiles(parallel, shape.sequence * shape.heads, workspace, bytes, [&](std::int64_t tile, Scratch scratch) {
      const std::int64_t n = tile / shape.heads, h = tile % shape.heads, position = tokens.position(n);
      const std::int64_t row = tokens.rows[n] * cache.keys.shape[1] * width + h / shape.group() * dim;
      const std::int64_t first = shape.window > 0 ? std::max<std::int64_t>(0, position + 1 - shape.window) : 0;
      float* const scores = scratch.floats(block);
      attend(Query<T>{static_cast<const T*>(q.data) + n * q.row_stride + h * dim, cache.keys.as<T>() + row,
                      cache.values.as<T>() + row, width, out.as<T>() + (n * shape.heads + h) * dim, first, position + 1,
                      dim, shape.scale},
             scores, scratch.floats(dim));
    });
  });
}

}  // namespace tandem::fast
