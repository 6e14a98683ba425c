// Linear layers of few rows: sums of products straight from the weight as it lies in memory, each row of which is read
// once for all of them.
#include <algorithm>

#include "core/numerics/functions.hpp"
#include "core/ops/rows_product.hpp"
#include "cpu_ops/kernels/elements.hpp"
#include "cpu_ops/kernels/kernels.hpp"

namespace tandem::fast {
namespace {

constexpr int lanes = 32;
/// Outputs that a thread makes at once: few enough for an even share, enough to be worth a task.
constexpr std::int64_t outputs = 32;
/// Rows of x that share a reading of the weight: their sums have to stay in registers.
constexpr std::int64_t rows_at_once = 4;
/// Outputs of a row, where there are fewer rows: several sums under way hide how long each addition takes.
constexpr std::int64_t outputs_at_once = 4;

/// A sum's lanes: lane i % 32 takes input i.
struct Lanes {
  float sum[lanes] = {};

  /// Adds the lanes pairwise at distances 16 ... 1.
  float total() {
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
      for (int j = 0; j < distance; ++j) sum[j] += sum[j + distance];
    }
    return sum[0];
  }
};

/// A block of outputs for a block of rows. The order of a sum is the same in every block.
template <int rows, int outs, class X, class Y>
inline void make_block(const RowsProduct<X, Y>& p, std::int64_t row, std::int64_t output) {
  const X* const x = p.x + row * p.in;
  const bf16* const w = p.w + output * p.in;
  Lanes lane[outs][rows];
  std::int64_t i = 0;
  for (; i + lanes <= p.in; i += lanes) {
    for (int o = 0; o < outs; ++o) {
      // The next block's line, which would else be waited for.
      __builtin_prefetch(w + (o + outs) * p.in + i);
      float weight[lanes];
      for (int j = 0; j < lanes; ++j) weight[j] = numerics::bf16_to_float(w[o * p.in + i + j]);
      for (int r = 0; r < rows; ++r) {
        float* const sum = lane[o][r].sum;
        const X* const from = x + r * p.in + i;
        for (int j = 0; j < lanes; ++j) sum[j] = numerics::fma(to_float(from[j]), weight[j], sum[j]);
      }
    }
  }
  for (int o = 0; o < outs; ++o) {
    const float added = p.bias == nullptr ? 0.0F : to_float(p.bias[output + o]);
    for (int r = 0; r < rows; ++r) {
      for (std::int64_t rest = i; rest < p.in; ++rest) {
        float& sum = lane[o][r].sum[rest - i];
        sum = numerics::fma(to_float(x[r * p.in + rest]), numerics::bf16_to_float(w[o * p.in + rest]), sum);
      }
      p.y[(row + r) * p.out + output + o] = from_float<Y>(lane[o][r].total() + added);
    }
  }
}

/// `outs` outputs for all rows.
template <int outs, class X, class Y>
inline void make_rows(const RowsProduct<X, Y>& p, std::int64_t output) {
  std::int64_t row = 0;
  if constexpr (outs == 1) {
    for (; row + rows_at_once <= p.rows; row += rows_at_once) make_block<rows_at_once, 1>(p, row, output);
  }
  for (; row < p.rows; ++row) make_block<1, outs>(p, row, output);
}

template <class X, class Y>
void make_outputs(const RowsProduct<X, Y>& p, std::int64_t begin, std::int64_t length) {
  vectorised([=] {
    std::int64_t output = begin;
    if (p.rows < rows_at_once) {
      for (; output + outputs_at_once <= begin + length; output += outputs_at_once) {
        make_rows<outputs_at_once>(p, output);
      }
    }
    for (; output < begin + length; ++output) make_rows<1>(p, output);
  });
}

}  // namespace

void linear_rows(Parallel& parallel, TensorView x, TensorView w, TensorView bias, TensorView y) {
  with_activation(x.dtype, [&]<class X>(X) {
    with_activation(y.dtype, [&]<class Y>(Y) {
      const RowsProduct<X, Y> product{x.as<X>(),  w.as<bf16>(), optional<bf16>(bias), y.as<Y>(), x.shape[0],
                                      w.shape[1], w.shape[0]};
      for_ranges(parallel, product.out, outputs,
                 [&](std::int64_t begin, std::int64_t length) { make_outputs(product, begin, length); });
    });
  });
}

}  // namespace tandem::fast
