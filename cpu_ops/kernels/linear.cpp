// Linear layers as products of tiles: the number of threads cannot change a bit.
#include "cpu_ops/kernels/elements.hpp"
#include "cpu_ops/kernels/kernels.hpp"
#include "cpu_ops/kernels/product_tiles.hpp"

namespace tandem::fast {
namespace {

std::int64_t whole_vectors(std::int64_t n) { return (n + grain - 1) / grain * grain; }

/// All tiles of a product of `n` rows with columns.
template <class Product>
void make_tiles(Parallel& parallel, const Workspace& workspace, std::int64_t n, const Product& product) {
  const Blocks rows = row_blocks(n);
  const TileRoom room = product.room(std::min(rows.size, n));
  for_tiles(parallel, rows.count * product.columns.count, workspace, room.bytes(),
            [&](std::int64_t tile, Scratch scratch) {
              product.make_tile(range_of(rows, tile % rows.count), tile / rows.count, TileBuffers(scratch, room));
            });
}

template <class Dy, class X, class Dw>
void backward_weight(Parallel& parallel, const Workspace& workspace, std::int64_t n,
                     const WeightProduct<Dy, X, Dw>& product) {
  const Blocks depth(n, most_summed_rows);
  const TileRoom room = product.room(depth.size);
  for_tiles(parallel, product.tiles(), workspace, room.bytes(),
            [&](std::int64_t tile, Scratch scratch) { product.make_tile(0, depth, tile, TileBuffers(scratch, room)); });
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
  const TileRoom room =
      activations == DType::f32 ? TileRoom{0, c * d, 0} : TileRoom{r * d, std::max(c, r) * d, std::max(r, d) * c};
  return static_cast<std::size_t>(threads) * room.bytes();
}

void linear(Parallel& parallel, const Workspace& workspace, TensorView x, TensorView w, TensorView bias, TensorView y) {
  const std::int64_t in = w.shape[1], out = w.shape[0];
  with_activation(x.dtype, [&]<class X>(X) {
    with_activation(y.dtype, [&]<class Y>(Y) {
      make_tiles(parallel, workspace, x.shape[0],
                 ForwardProduct<X, Y>{{x.as<X>(), in}, w.as<bf16>(), optional<bf16>(bias), y.as<Y>(), in, out});
    });
  });
}

void linear_backward_input(Parallel& parallel, const Workspace& workspace, TensorView dy, TensorView w, TensorView dx,
                           bool accumulate) {
  const std::int64_t in = w.shape[1], out = w.shape[0];
  with_activation(dy.dtype, [&]<class Dy>(Dy) {
    with_activation(dx.dtype, [&]<class Dx>(Dx) {
      make_tiles(parallel, workspace, dy.shape[0],
                 InputProduct<Dy, Dx>{{dy.as<Dy>(), out}, w.as<bf16>(), dx.as<Dx>(), accumulate, in, out});
    });
  });
}

void linear_backward_weight(Parallel& parallel, const Workspace& workspace, TensorView dy, TensorView x, TensorView dw,
                            TensorView dbias) {
  const std::int64_t n = dy.shape[0], out = dy.shape[1], in = x.shape[1];
  with_activation(dy.dtype, [&]<class Dy>(Dy) {
    const auto multiply = [&]<class X, class Dw>(X, Dw) {
      backward_weight(parallel, workspace, n,
                      WeightProduct<Dy, X, Dw>{{dy.as<Dy>(), out}, {x.as<X>(), in}, dw.as<Dw>(), in, out});
    };
    if (dw) {
      with_activation(
          x.dtype, [&](auto x_type) { with_activation(dw.dtype, [&](auto dw_type) { multiply(x_type, dw_type); }); });
    }
    if (dbias) backward_bias(parallel, dy.as<Dy>(), dbias.as<float>(), n, out);
  });
}

}  // namespace tandem::fast
