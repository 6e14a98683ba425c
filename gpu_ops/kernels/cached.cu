// Decoding: attention of single tokens over keys and values in a cache, and products of few rows. No sum depends on how
// many tokens are at work.
#include "core/ops/rows_product.hpp"
#include "gpu_ops/base/launch.hpp"
#include "gpu_ops/kernels/attention_operands.hpp"
#include "gpu_ops/kernels/block_sums.hpp"

namespace tandem::gpu {
namespace {

constexpr int row_warps = 4;
/// Rows of x that share a reading of the weight.
constexpr int rows_at_once = 4;

/// A warp for each output: lanes take packets of inputs by turns, then lanes pairwise at distances 16 ... 1.
template <class X, class Y>
TANDEM_KERNEL(row_warps* warp_lanes)
linear_rows_kernel(RowsProduct<X, Y> p, bool aligned) {
  const int lane = own_lane();
  const std::int64_t first = block_index() * row_warps + thread_index() / warp_lanes;
  for (std::int64_t output = first; output < p.out; output += grid_size() * row_warps) {
    for (std::int64_t row = 0; row < p.rows; row += rows_at_once) {
      float sum[rows_at_once] = {};
      for (std::int64_t at = std::int64_t{lane} * packet; at < p.in; at += warp_lanes * packet) {
        const Span span = span_at(at, p.in, aligned);
        const Floats weight = load(p.w + output * p.in, span);
        TANDEM_UNROLL
        for (int r = 0; r < rows_at_once; ++r) {
          if (row + r >= p.rows) continue;
          const Floats x = load(p.x + (row + r) * p.in, span);
          for (int i = 0; i < packet; ++i) sum[r] = numerics::fma(x.x[i], weight.x[i], sum[r]);
        }
      }
      TANDEM_UNROLL
      for (int r = 0; r < rows_at_once; ++r) {
        const float all = warp_sum(sum[r]);
        if (lane != 0 || row + r >= p.rows) continue;
        const float added = p.bias == nullptr ? 0.0F : to_float(p.bias[output]);
        p.y[(row + r) * p.out + output] = from_float<Y>(all + added);
      }
    }
  }
}

/// A cache whose sequences are `length` positions of `width` elements.
template <class T>
struct CacheView {
  T *keys, *values;
  std::int64_t length, width;
  CachedTokens tokens;

  TANDEM_DEVICE std::int64_t row(std::int64_t n) const { return tokens.rows[n] * length * width; }
};

template <class T>
CacheView<T> view_of(const KeyValueCache& cache, const CachedTokens& tokens) {
  return {cache.keys.as<T>(), cache.values.as<T>(), cache.keys.shape[1], cache.keys.shape[2], tokens};
}

template <class T>
TANDEM_KERNEL(most_threads)
store_kernel(HeadsView k, HeadsView v, CacheView<T> cache, std::int64_t tokens, bool aligned) {
  for (std::int64_t n = block_index(); n < tokens; n += grid_size()) {
    const std::int64_t place = cache.row(n) + cache.tokens.position(n) * cache.width;
    for_row_spans(cache.width, aligned, [&](const Span& span) {
      store(cache.keys + place, span, load(static_cast<const T*>(k.data) + n * k.row_stride, span));
      store(cache.values + place, span, load(static_cast<const T*>(v.data) + n * v.row_stride, span));
    });
  }
}

constexpr int cached_warps = 8;
/// Dimensions of a head that a lane holds.
constexpr int own_dimensions = most_head_dim / warp_lanes;

/// Softmax of the keys that one warp has weighed.
struct WarpSoftmax {
  float largest, sum;
  float out[own_dimensions];
};

/// Adds the key and value at `place` of the head.
template <class T>
TANDEM_DEVICE void weigh(WarpSoftmax& own, const float (&query)[own_dimensions], const CacheView<T>& cache,
                         std::int64_t place, int dim, float scale) {
  float product = 0.0F;
  TANDEM_UNROLL
  for (int i = 0; i < own_dimensions; ++i) {
    const int d = own_lane() + i * warp_lanes;
    if (d < dim) product = numerics::fma(query[i], to_float(cache.keys[place + d]), product);
  }
  const float score = scale * warp_sum(product);
  const float top = score > own.largest ? score : own.largest;
  const float shrink = numerics::exp(own.largest - top), weight = numerics::exp(score - top);
  own.largest = top;
  own.sum = numerics::fma(own.sum, shrink, weight);
  TANDEM_UNROLL
  for (int i = 0; i < own_dimensions; ++i) {
    const int d = own_lane() + i * warp_lanes;
    if (d < dim) own.out[i] = numerics::fma(weight, to_float(cache.values[place + d]), own.out[i] * shrink);
  }
}

/// A block for each head of each token: its warps take the positions by turns, and what they made is added up in their
/// order.
template <class T>
TANDEM_KERNEL(cached_warps* warp_lanes)
cached_attention_kernel(HeadsView q, CacheView<T> cache, T* out, AttentionShape shape) {
  TANDEM_SHARED(float, largest, cached_warps);
  TANDEM_SHARED(float, sums, cached_warps);
  TANDEM_SHARED(float, parts, cached_warps* most_head_dim);
  const std::int64_t n = block_index() / shape.heads, h = block_index() % shape.heads;
  const int dim = static_cast<int>(shape.head_dim), warp = thread_index() / warp_lanes, lane = own_lane();
  const T* const from = static_cast<const T*>(q.data) + n * q.row_stride + h * dim;
  float query[own_dimensions];
  TANDEM_UNROLL
  for (int i = 0; i < own_dimensions; ++i) {
    const int d = lane + i * warp_lanes;
    query[i] = d < dim ? to_float(from[d]) : 0.0F;
  }
  WarpSoftmax own = {numerics::bits_float(lowest), 0.0F, {}};
  const std::int64_t end = cache.tokens.position(n) + 1, head = cache.row(n) + h / shape.group() * dim;
  const std::int64_t first = shape.window > 0 && shape.window < end ? end - shape.window : 0;
  for (std::int64_t j = first + warp; j < end; j += cached_warps) {
    weigh(own, query, cache, head + j * cache.width, dim, shape.scale);
  }
  TANDEM_UNROLL
  for (int i = 0; i < own_dimensions; ++i) parts[warp * most_head_dim + lane + i * warp_lanes] = own.out[i];
  if (lane == 0) largest[warp] = own.largest, sums[warp] = own.sum;
  barrier();
  float top = largest[0], sum = 0.0F, value = 0.0F;
  for (int w = 1; w < cached_warps; ++w) top = largest[w] > top ? largest[w] : top;
  for (int w = 0; w < cached_warps; ++w) {
    const float factor = numerics::exp(largest[w] - top);
    sum = numerics::fma(sums[w], factor, sum);
    value = numerics::fma(parts[w * most_head_dim + thread_index()], factor, value);
  }
  if (thread_index() < dim)
    out[(n * shape.heads + h) * dim + thread_index()] = from_float<T>(numerics::div(value, sum));
}
static_assert(cached_warps * warp_lanes == most_head_dim);

}  // namespace

void linear_rows(TensorView x, TensorView w, TensorView bias, TensorView y, CUstream_st* stream) {
  const std::int64_t in = w.shape[1], out = w.shape[0];
  const Geometry geometry{x.shape[0] > 0 ? blocks_for(out, row_warps) : 0, row_warps * warp_lanes};
  with_activation(x.dtype, [&]<class X>(X) {
    with_activation(y.dtype, [&]<class Y>(Y) {
      const RowsProduct<X, Y> product{x.as<X>(), w.as<bf16>(), optional<bf16>(bias), y.as<Y>(), x.shape[0], in, out};
      launch("linear_rows", linear_rows_kernel<X, Y>, geometry, stream, product,
             whole_packets<bf16>(in) && aligned(x.data, w.data));
    });
  });
}

void store_keys_values(const HeadsView& k, const HeadsView& v, const KeyValueCache& cache, const CachedTokens& tokens,
                       const AttentionShape& shape, CUstream_st* stream) {
  with_activation(k.dtype, [&]<class T>(T) {
    const CacheView<T> view = view_of<T>(cache, tokens);
    const bool whole = whole_packets<T>(view.width) && aligned(view.keys, view.values) &&
                       whole_packets<T>(k.row_stride) && whole_packets<T>(v.row_stride) && aligned(k.data, v.data);
    launch("store_keys_values", store_kernel<T>, row_geometry(shape.sequence, view.width), stream, k, v, view,
           shape.sequence, whole);
  });
}

void cached_attention(const HeadsView& q, const KeyValueCache& cache, const CachedTokens& tokens, TensorView out,
                      const AttentionShape& shape, CUstream_st* stream) {
  require_narrow_heads(shape);
  with_activation(q.dtype, [&]<class T>(T) {
    launch("cached_attention", cached_attention_kernel<T>,
           Geometry{shape.sequence * shape.heads, cached_warps * warp_lanes}, stream, q, view_of<T>(cache, tokens),
           out.as<T>(), shape);
  });
}

}  // namespace tandem::gpu
