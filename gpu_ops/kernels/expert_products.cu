// Linear layers of which each row has its expert's: the plain products, for f32 activations, in the tiles of
// matmul_tiles.hpp. Those of bf16 are made on tensor cores.
#include <type_traits>

#include "gpu_ops/base/kernels.hpp"
#include "gpu_ops/base/launch.hpp"
#include "gpu_ops/kernels/elements.hpp"
#include "gpu_ops/kernels/expert_tiles.hpp"
#include "gpu_ops/kernels/matmul_tiles.hpp"

namespace tandem::gpu {
namespace {

constexpr int tile = PlainTiling::rows;
constexpr int depth = PlainTiling::depth;

TANDEM_KERNEL(most_threads)
expert_product_kernel(RowProduct<float> p) {
  TANDEM_SHARED(float, x_tile, PlainTiling::room);
  TANDEM_SHARED(float, w_tile, PlainTiling::room);
  const std::int64_t columns = ceil_div(p.n, tile), tiles = most_expert_tiles(p.rows, p.experts, tile) * columns;
  for (std::int64_t index = block_index(); index < tiles; index += grid_size()) {
    const ExpertTile rows = find_tile(p.begins, p.experts, index / columns, tile);
    if (rows.expert < 0) return;  // nor are there later ones
    const std::int64_t first = index % columns * tile;
    const bf16* const w = p.w + rows.expert * p.n * p.k;
    PlainSums sums = {};
    for (std::int64_t k = 0; k < p.k; k += depth) {
      stage_values(false, x_tile, [&](int r, int c) {
        return rows.first + r < rows.end && k + c < p.k ? p.x.row(rows.first + r)[k + c] : 0.0F;
      });
      stage_values(p.across, w_tile, [&](int r, int c) {
        if (first + r >= p.n || k + c >= p.k) return 0.0F;
        return to_float(w[p.across ? (k + c) * p.n + first + r : (first + r) * p.k + k + c]);
      });
      barrier();
      multiply(x_tile, w_tile, sums);
      barrier();
    }
    for_sums(sums, [&](int r, int c, float value) {
      if (rows.first + r >= rows.end || first + c >= p.n) return;
      float& y = p.y[(rows.first + r) * p.n + first + c];
      y = p.accumulate ? y + value : value;
    });
  }
}

template <class W>
TANDEM_KERNEL(most_threads)
expert_weight_product_kernel(WeightProduct<float, W> p) {
  TANDEM_SHARED(float, dy_tile, PlainTiling::room);
  TANDEM_SHARED(float, x_tile, PlainTiling::room);
  constexpr bool adds = std::is_same_v<W, float>;
  const std::int64_t across = ceil_div(p.n, tile), of_expert = across * ceil_div(p.m, tile);
  for (std::int64_t index = block_index(); index < p.experts * of_expert; index += grid_size()) {
    const std::int64_t expert = index / of_expert, begin = p.begins[expert], end = p.begins[expert + 1];
    const std::int64_t first_row = index % of_expert / across * tile, first_column = index % across * tile;
    PlainSums sums = {};
    for (std::int64_t k = begin; k < end; k += depth) {
      stage_values(true, dy_tile, [&](int r, int c) {
        return k + c < end && first_row + r < p.m ? p.dy.row(k + c)[first_row + r] : 0.0F;
      });
      stage_values(true, x_tile, [&](int r, int c) {
        return k + c < end && first_column + r < p.n ? p.x.row(k + c)[first_column + r] : 0.0F;
      });
      barrier();
      multiply(dy_tile, x_tile, sums);
      barrier();
    }
    for_sums(sums, [&](int r, int c, float value) {
      const std::int64_t row = first_row + r, column = first_column + c;
      if (row >= p.m || column >= p.n) return;
      W& dw = p.dw[(expert * p.m + row) * p.n + column];
      dw = from_float<W>(adds ? to_float(dw) + value : value);
    });
  }
}

template <class T>
RowSource<T> source(const RowValues& x, const Routing& r) {
  return {x.values.as<T>(), x.values.shape[1], x.of_tokens ? r.slots.as<std::int32_t>() : nullptr,
          divisor_by(r.experts.shape[1])};
}

template <class T>
RowProduct<T> row_product(const RowValues& x, const TensorView& w, const Routing& r, const TensorView& y) {
  return {.x = source<T>(x, r),
          .w = w.as<bf16>(),
          .y = y.as<T>(),
          .begins = r.begins.as<std::int32_t>(),
          .experts = w.shape[0],
          .rows = y.shape[0],
          .k = x.values.shape[1],
          .n = y.shape[1],
          .across = false,
          .accumulate = false};
}

void run(const RowProduct<bf16>& p, CUstream_st* stream) { tensor_expert_product(p, stream); }
void run(const RowProduct<float>& p, CUstream_st* stream) {
  const std::int64_t tiles = most_expert_tiles(p.rows, p.experts, tile) * ceil_div(p.n, tile);
  launch("expert_product", expert_product_kernel, Geometry{blocks_for(tiles, 1), most_threads}, stream, p);
}

template <class W>
void run(const WeightProduct<bf16, W>& p, CUstream_st* stream) {
  tensor_expert_weight_product(p, stream);
}
template <class W>
void run(const WeightProduct<float, W>& p, CUstream_st* stream) {
  const std::int64_t tiles = p.experts * ceil_div(p.m, tile) * ceil_div(p.n, tile);
  launch("expert_weight_product", expert_weight_product_kernel<W>, Geometry{blocks_for(tiles, 1), most_threads}, stream,
         p);
}

}  // namespace

void expert_linear(const RowValues& x, TensorView w, const Routing& routing, TensorView y, CUstream_st* stream) {
  with_activation(y.dtype, [&]<class T>(T) { run(row_product<T>(x, w, routing, y), stream); });
}

void expert_backward_input(const RowValues& dy, TensorView w, const Routing& routing, TensorView dx, bool accumulate,
                           CUstream_st* stream) {
  with_activation(dx.dtype, [&]<class T>(T) {
    RowProduct<T> p = row_product<T>(dy, w, routing, dx);
    p.across = true;
    p.accumulate = accumulate;
    run(p, stream);
  });
}

void expert_backward_weight(const RowValues& dy, const RowValues& x, const Routing& routing, TensorView dw,
                            CUstream_st* stream) {
  with_activation(x.values.dtype, [&]<class T>(T) {
    with_activation(dw.dtype, [&]<class W>(W) {
      run(WeightProduct<T, W>{source<T>(dy, routing), source<T>(x, routing), dw.as<W>(),
                              routing.begins.as<std::int32_t>(), dw.shape[0], dw.shape[1], dw.shape[2]},
          stream);
    });
  });
}

}  // namespace tandem::gpu
