#pragma once
// One tile of the result of a linear layer's products, made by one thread, depth summed in order. The tiling is a
// function of the shapes alone, and an element's bits depend on the division of the depth alone (tile_gemm), not on its
// place in a tile. Factors are rows of activations, which may lie anywhere, and dense weights.
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cpu_ops/kernels/elements.hpp"
#include "cpu_ops/kernels/gemm.hpp"
#include "cpu_ops/kernels/scratch.hpp"

namespace tandem::fast {

// Largest tiles. A block of weights (columns x depth) as fp32 fills a fifth of a 2 MiB second-level cache; many
// rows share its conversion; the narrow columns leave enough tiles for all threads at GPT-2's 768 channels.
constexpr std::int64_t most_rows = 516;
constexpr std::int64_t row_grain = 12;          // whole tiles of the library on AVX2, which tile_gemm() would else pad
constexpr std::int64_t most_summed_rows = 512;  // the depth of a weight's gradient
constexpr std::int64_t most_columns = 128;
constexpr std::int64_t most_depth = 768;
constexpr std::int64_t grain = 16;  // block sizes are whole vectors

/// Blocks of the rows of a product, but for a weight's gradient, whose depth they are.
inline Blocks row_blocks(std::int64_t rows) { return {rows, most_rows, row_grain}; }

template <class T>
constexpr bool is_float = std::is_same_v<T, float>;

/// Rows of activations: one after another, or those of the tokens of slots, `choices` to a token.
template <class T>
struct Rows {
  const T* data = nullptr;
  std::int64_t stride = 0;
  const std::int32_t* slots = nullptr;
  std::int64_t choices = 1;

  /// Whether blocks are used where they lie, without room for a copy.
  bool in_place() const { return is_float<T> && slots == nullptr; }

  /// Rows [first, first + rows), columns [begin, begin + columns); `room`: rows x columns, where not in_place().
  FloatBlock block(std::int64_t first, std::int64_t rows, std::int64_t begin, std::int64_t columns, float* room) const {
    if (slots == nullptr) return as_floats(data + first * stride + begin, stride, rows, columns, room);
    vectorised([=, from = data + begin, apart = stride, slot = slots + first, per_token = choices] {
      for (std::int64_t r = 0; r < rows; ++r) {
        const T* const source = from + slot[r] / per_token * apart;
        float* const target = room + r * columns;
#pragma GCC ivdep
        for (std::int64_t c = 0; c < columns; ++c) target[c] = to_float(source[c]);
      }
    });
    return {room, columns};
  }
};

/// One worker's buffers, elements: a block of each factor and one of the result.
struct TileRoom {
  std::int64_t left = 0, right = 0, result = 0;
  std::size_t bytes() const { return Scratch::bytes_of(left) + Scratch::bytes_of(right) + Scratch::bytes_of(result); }
};
struct TileBuffers {
  TileBuffers(Scratch scratch, const TileRoom& room)
      : left(scratch.floats(room.left)), right(scratch.floats(room.right)), result(scratch.floats(room.result)) {}
  float* left;
  float* right;
  float* result;
};

/// [begin, begin + length).
struct Range {
  std::int64_t begin, length;
};
inline Range range_of(const Blocks& blocks, std::int64_t i) { return {blocks.begin(i), blocks.length(i)}; }

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

inline void add_rounded(const float* from, std::int64_t rows, std::int64_t columns, bf16* to, std::int64_t stride) {
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

/// y = x w^T + bias: w (outputs, inputs), bias (outputs) or null, y (rows, outputs).
template <class X, class Y>
struct ForwardProduct {
  Rows<X> x;
  const bf16* w = nullptr;
  const bf16* bias = nullptr;
  Y* y = nullptr;
  std::int64_t in = 0, out = 0;
  Blocks columns{out, most_columns, grain}, depth{in, most_depth, grain};

  TileRoom room(std::int64_t rows) const {
    return {x.in_place() ? 0 : rows * depth.size, columns.size * depth.size, is_float<Y> ? 0 : rows * columns.size};
  }
  /// Block c of the columns.
  void make_tile(const Range& rows, std::int64_t c, const TileBuffers& buffer) const {
    const Range outputs = range_of(columns, c);
    Y* const target = y + rows.begin * out + outputs.begin;
    float* result = buffer.result;
    std::int64_t stride = outputs.length;
    if constexpr (is_float<Y>) {
      result = target;
      stride = out;
    }
    for (std::int64_t d = 0; d < depth.count; ++d) {
      const auto [k, kn] = range_of(depth, d);
      const FloatBlock a = x.block(rows.begin, rows.length, k, kn, buffer.left);
      const FloatBlock b = as_floats(w + outputs.begin * in + k, in, outputs.length, kn, buffer.right);
      tile_gemm(rows.length, outputs.length, kn, {Op::plain, Op::transposed, a.data, a.stride, b.data, b.stride},
                d == 0 ? 0.0F : 1.0F, result, stride);
    }
    finish(result, stride, rows.length, outputs.length, bias == nullptr ? nullptr : bias + outputs.begin, target, out);
  }
};

/// dx = or += dy w: dx (rows, inputs).
template <class Dy, class Dx>
struct InputProduct {
  Rows<Dy> dy;
  const bf16* w = nullptr;
  Dx* dx = nullptr;
  bool accumulate = false;
  std::int64_t in = 0, out = 0;
  Blocks columns{in, most_columns, grain}, depth{out, most_depth, grain};

  TileRoom room(std::int64_t rows) const {
    return {dy.in_place() ? 0 : rows * depth.size, columns.size * depth.size, is_float<Dx> ? 0 : rows * columns.size};
  }
  void make_tile(const Range& rows, std::int64_t c, const TileBuffers& buffer) const {
    const Range inputs = range_of(columns, c);
    Dx* const target = dx + rows.begin * in + inputs.begin;
    float* result = buffer.result;
    std::int64_t stride = inputs.length;
    float beta = 0.0F;
    if constexpr (is_float<Dx>) {
      result = target;
      stride = in;
      beta = accumulate ? 1.0F : 0.0F;
    }
    for (std::int64_t d = 0; d < depth.count; ++d) {
      const auto [k, kn] = range_of(depth, d);
      const FloatBlock a = dy.block(rows.begin, rows.length, k, kn, buffer.left);
      const FloatBlock b = as_floats(w + k * in + inputs.begin, in, kn, inputs.length, buffer.right);
      tile_gemm(rows.length, inputs.length, kn, {Op::plain, Op::plain, a.data, a.stride, b.data, b.stride},
                d == 0 ? beta : 1.0F, result, stride);
    }
    if constexpr (!is_float<Dx>) {
      if (accumulate) {
        add_rounded(result, rows.length, inputs.length, target, in);
      } else {
        store_block(result, rows.length, inputs.length, target, in);
      }
    }
  }
};

/// dw (outputs, inputs) of dy^T x, summed over rows: fp32 is added to, bf16 is written. The depth is rows here.
template <class Dy, class X, class Dw>
struct WeightProduct {
  Rows<Dy> dy;
  Rows<X> x;
  Dw* dw = nullptr;
  std::int64_t in = 0, out = 0;
  Blocks outputs{out, most_columns, grain}, inputs{in, most_depth, grain};

  TileRoom room(std::int64_t rows) const {
    return {dy.in_place() ? 0 : outputs.size * rows, x.in_place() ? 0 : inputs.size * rows,
            is_float<Dw> ? 0 : outputs.size * inputs.size};
  }
  std::int64_t tiles() const { return outputs.count * inputs.count; }
  /// Computes one tile from the rows from `first` on, in blocks of `depth`.
  void make_tile(std::int64_t first, const Blocks& depth, std::int64_t tile, const TileBuffers& buffer) const {
    const auto [o, on] = range_of(outputs, tile / inputs.count);
    const auto [i, width] = range_of(inputs, tile % inputs.count);
    Dw* const target = dw + o * in + i;
    float* result = buffer.result;
    std::int64_t stride = width;
    if constexpr (is_float<Dw>) {
      result = target;
      stride = in;
    }
    for (std::int64_t t = 0; t < depth.count && depth.extent > 0; ++t) {
      const auto [k, kn] = range_of(depth, t);
      const FloatBlock a = dy.block(first + k, kn, o, on, buffer.left);
      const FloatBlock b = x.block(first + k, kn, i, width, buffer.right);
      const float beta = is_float<Dw> || t > 0 ? 1.0F : 0.0F;
      tile_gemm(on, width, kn, {Op::transposed, Op::plain, a.data, a.stride, b.data, b.stride}, beta, result, stride);
    }
    if constexpr (!is_float<Dw>) {
      if (depth.extent == 0) std::fill_n(result, on * width, 0.0F);
      store_block(result, on, width, target, in);
    }
  }
};

}  // namespace tandem::fast
