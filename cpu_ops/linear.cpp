// Linear layers as products of tiles. The tiling is a function of the shapes alone, every tile is made by
// one thread, and depth is summed in order: the number of threads cannot change a bit.
#include <type_traits>

#include "cpu_ops/elements.hpp"
#include "cpu_ops/gemm.hpp"
#include "cpu_ops/kernels.hpp"

namespace tandem::fast {
namespace {

// Largest tiles. A block of weights (columns x depth) as fp32 fills a fifth of a 2 MiB second-level cache; many
// rows share its conversion; the narrow columns leave enough tiles for all threads at GPT-2's 768 channels.
constexpr std::int64_t most_rows = 512;
constexpr std::int64_t most_columns = 128;
constexpr std::int64_t most_depth = 768;
constexpr std::int64_t grain = 16;  // block sizes are whole vectors

std::int64_t whole_vectors(std::int64_t n) { return (n + grain - 1) / grain * grain; }

/// One worker's buffers: a block of each factor and one of the result.
struct TileBuffers {
  TileBuffers(Scratch scratch, std::int64_t a, std::int64_t b, std::int64_t c)
      : left(scratch.floats(a)), right(scratch.floats(b)), result(scratch.floats(c)) {}
  static std::size_t bytes(std::int64_t a, std::int64_t b, std::int64_t c) {
    return Scratch::bytes_of(a) + Scratch::bytes_of(b) + Scratch::bytes_of(c);
  }
  float* left;
  float* right;
  float* result;
};

template <class T>
constexpr bool is_float = std::is_same_v<T, float>;

struct Extents {
  std::int64_t left, right, result;
  std::size_t bytes() const { return TileBuffers::bytes(left, right, result); }
};

/// rows x columns of the result over depth; what is fp32 already needs no buffer.
template <class Left, class Right, class Result>
Extents buffers_for(const Blocks& rows, const Blocks& columns, const Blocks& depth) {
  return {is_float<Left> ? 0 : rows.size * depth.size, is_float<Right> ? 0 : columns.size * depth.size,
          is_float<Result> ? 0 : rows.size * columns.size};
}

/// to = from + bias, from fp32 and dense, or in place where Y is fp32.
template <class Y>
void finish(const float* from, std::int64_t from_stride, std::int64_t rows, std::int64_t columns, const bf16* bias,
            Y* to, std::int64_t stride) {
  if (is_float<Y> && bias == nullptr) return;
  vectorised([=] {
    for (std::int64_t r = 0; r < rows; ++r) {
      const float* const source = from + r * from_stride;
      Y* const target = to + r * stride;
      if (bias != nullptr) {
#pragma GCC ivdep
        for (std::int64_t c = 0; c < columns; ++c) {
          target[c] = from_float<Y>(source[c] + numerics::bf16_to_float(bias[c]));
        }
      } else {
#pragma GCC ivdep
        for (std::int64_t c = 0; c < columns; ++c) target[c] = from_float<Y>(source[c]);
      }
    }
  });
}

void add_rounded(const float* from, std::int64_t rows, std::int64_t columns, bf16* to, std::int64_t stride) {
  vectorised([=] {
    for (std::int64_t r = 0; r < rows; ++r) {
      const float* const source = from + r * columns;
      bf16* const target = to + r * stride;
#pragma GCC ivdep
      for (std::int64_t c = 0; c < columns; ++c) {
        target[c] = numerics::round_to_bf16(numerics::bf16_to_float(target[c]) + source[c]);
      }
    }
  });
}

template <class X, class Y>
void forward(Parallel& parallel, const Workspace& workspace, const X* x, const bf16* w, const bf16* bias, Y* y,
             std::int64_t n, std::int64_t in, std::int64_t out) {
  const Blocks rows(n, most_rows), columns(out, most_columns, grain), depth(in, most_depth, grain);
  const Extents room = buffers_for<X, bf16, Y>(rows, columns, depth);
  for_tiles(parallel, rows.count * columns.count, workspace, room.bytes(), [&](std::int64_t tile, Scratch scratch) {
    const TileBuffers buffer(scratch, room.left, room.right, room.result);
    const std::int64_t r = tile % rows.count, c = tile / rows.count;
    const std::int64_t rn = rows.length(r), cn = columns.length(c);
    Y* const target = y + rows.begin(r) * out + columns.begin(c);
    float* result = buffer.result;
    std::int64_t stride = cn;
    if constexpr (is_float<Y>) {
      result = target;
      stride = out;
    }
    for (std::int64_t d = 0; d < depth.count; ++d) {
      const std::int64_t k = depth.begin(d), kn = depth.length(d);
      const FloatBlock a = as_floats(x + rows.begin(r) * in + k, in, rn, kn, buffer.left);
      const FloatBlock b = as_floats(w + columns.begin(c) * in + k, in, cn, kn, buffer.right);
      gemm(Op::plain, Op::transposed, rn, cn, kn, 1.0F, a.data, a.stride, b.data, b.stride, d == 0 ? 0.0F : 1.0F,
           result, stride);
    }
    finish(result, stride, rn, cn, bias == nullptr ? nullptr : bias + columns.begin(c), target, out);
  });
}

template <class Dy, class Dx>
void backward_input(Parallel& parallel, const Workspace& workspace, const Dy* dy, const bf16* w, Dx* dx,
                    bool accumulate, std::int64_t n, std::int64_t in, std::int64_t out) {
  const Blocks rows(n, most_rows), columns(in, most_columns, grain), depth(out, most_depth, grain);
  const Extents room = buffers_for<Dy, bf16, Dx>(rows, columns, depth);
  for_tiles(parallel, rows.count * columns.count, workspace, room.bytes(), [&](std::int64_t tile, Scratch scratch) {
    const TileBuffers buffer(scratch, room.left, room.right, room.result);
    const std::int64_t r = tile % rows.count, c = tile / rows.count;
    const std::int64_t rn = rows.length(r), cn = columns.length(c);
    Dx* const target = dx + rows.begin(r) * in + columns.begin(c);
    float* result = buffer.result;
    std::int64_t stride = cn;
    float beta = 0.0F;
    if constexpr (is_float<Dx>) {
      result = target;
      stride = in;
      beta = accumulate ? 1.0F : 0.0F;
    }
    for (std::int64_t d = 0; d < depth.count; ++d) {
      const std::int64_t k = depth.begin(d), kn = depth.length(d);
      const FloatBlock a = as_floats(dy + rows.begin(r) * out + k, out, rn, kn, buffer.left);
      const FloatBlock b = as_floats(w + k * in + columns.begin(c), in, kn, cn, buffer.right);
      gemm(Op::plain, Op::plain, rn, cn, kn, 1.0F, a.data, a.stride, b.data, b.stride, d == 0 ? beta : 1.0F, result,
           stride);
    }
    if constexpr (!is_float<Dx>) {
      if (accumulate) {
        add_rounded(result, rn, cn, target, in);
      } else {
        store_block(result, rn, cn, target, in);
      }
    }
  });
}

/// dw tile (outputs x inputs), summed over tokens: here the rows are outputs, the depth is tokens. fp32 is added to,
/// bf16 is written.
template <class Dy, class X, class Dw>
void backward_weight(Parallel& parallel, const Workspace& workspace, const Dy* dy, const X* x, Dw* dw, std::int64_t n,
                     std::int64_t in, std::int64_t out) {
  const Blocks outputs(out, most_columns, grain), inputs(in, most_depth, grain), tokens(n, most_rows);
  const Extents room{is_float<Dy> ? 0 : outputs.size * tokens.size, is_float<X> ? 0 : inputs.size * tokens.size,
                     is_float<Dw> ? 0 : outputs.size * inputs.size};
  for_tiles(parallel, outputs.count * inputs.count, workspace, room.bytes(), [&](std::int64_t tile, Scratch scratch) {
    const TileBuffers buffer(scratch, room.left, room.right, room.result);
    const std::int64_t o = outputs.begin(tile / inputs.count), on = outputs.length(tile / inputs.count);
    const std::int64_t i = inputs.begin(tile % inputs.count), width = inputs.length(tile % inputs.count);
    Dw* const target = dw + o * in + i;
    float* result = buffer.result;
    std::int64_t stride = width;
    if constexpr (is_float<Dw>) {
      result = target;
      stride = in;
    }
    for (std::int64_t t = 0; t < tokens.count; ++t) {
      const std::int64_t k = tokens.begin(t), kn = tokens.length(t);
      const FloatBlock a = as_floats(dy + k * out + o, out, kn, on, buffer.left);
      const FloatBlock b = as_floats(x + k * in + i, in, kn, width, buffer.right);
      const float beta = is_float<Dw> || t > 0 ? 1.0F : 0.0F;
      gemm(Op::transposed, Op::plain, on, width, kn, 1.0F, a.data, a.stride, b.data, b.stride, beta, result, stride);
    }
    if constexpr (!is_float<Dw>) {
      if (tokens.count == 0) std::fill_n(result, on * width, 0.0F);
      store_block(result, on, width, target, in);
    }
  });
}

/// dbias += column sums, each in the order of rows.
template <class Dy>
void backward_bias(Parallel& parallel, const Dy* dy, float* dbias, std::int64_t n, std::int64_t out) {
  constexpr std::int64_t columns = 64;
  for_ranges(parallel, out, columns, [=](std::int64_t begin, std::int64_t length) {
    vectorised([=] {
      float sum[columns] = {};
      for (std::int64_t r = 0; r < n; ++r) {
        const Dy* const row = dy + r * out + begin;
        for (std::int64_t c = 0; c < length; ++c) sum[c] += to_float(row[c]);
      }
      for (std::int64_t c = 0; c < length; ++c) dbias[begin + c] += sum[c];
    });
  });
}

}  // namespace

std::size_t linear_scratch(std::int64_t rows, std::int64_t in, std::int64_t out, DType activations, int threads) {
  const std::int64_t r = std::min(most_rows, whole_vectors(rows));
  // Forward sums over inputs, the backward of inputs over outputs: the larger covers both.
  const std::int64_t widest = std::max(whole_vectors(in), whole_vectors(out));
  const std::int64_t d = std::min(most_depth, widest);
  const std::int64_t c = std::min(most_columns, widest);
  // A weight's tile as fp32, or that of its gradient before it is rounded, c d either way.
  const std::size_t each = activations == DType::f32
                               ? TileBuffers::bytes(0, c * d, 0)
                               : TileBuffers::bytes(r * d, std::max(c, r) * d, std::max(r, d) * c);
  return static_cast<std::size_t>(threads) * each;
}

void linear(Parallel& parallel, const Workspace& workspace, TensorView x, TensorView w, TensorView bias, TensorView y) {
  with_activation(x.dtype, [&](auto x_type) {
    with_activation(y.dtype, [&](auto y_type) {
      forward(parallel, workspace, x.as<decltype(x_type)>(), w.as<bf16>(), optional<bf16>(bias),
              y.as<decltype(y_type)>(), x.shape[0], w.shape[1], w.shape[0]);
    });
  });
}

void linear_backward_input(Parallel& parallel, const Workspace& workspace, TensorView dy, TensorView w, TensorView dx,
                           bool accumulate) {
  with_activation(dy.dtype, [&](auto dy_type) {
    with_activation(dx.dtype, [&](auto dx_type) {
      backward_input(parallel, workspace, dy.as<decltype(dy_type)>(), w.as<bf16>(), dx.as<decltype(dx_type)>(),
                     accumulate, dy.shape[0], w.shape[1], w.shape[0]);
    });
  });
}

void linear_backward_weight(Parallel& parallel, const Workspace& workspace, TensorView dy, TensorView x, TensorView dw,
                            TensorView dbias) {
  const std::int64_t n = dy.shape[0], out = dy.shape[1], in = x.shape[1];
  with_activation(dy.dtype, [&](auto dy_type) {
    const auto* const gradient = dy.as<decltype(dy_type)>();
    const auto multiply = [&](auto x_type, auto dw_type) {
      backward_weight(parallel, workspace, gradient, x.as<decltype(x_type)>(), dw.as<decltype(dw_type)>(), n, in, out);
    };
    if (dw) {
      with_activation(
          x.dtype, [&](auto x_type) { with_activation(dw.dtype, [&](auto dw_type) { multiply(x_type, dw_type); }); });
    }
    if (dbias) backward_bias(parallel, gradient, dbias.as<float>(), n, out);
  });
}

}  // namespace tandem::fast
