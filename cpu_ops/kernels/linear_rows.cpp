// Linear layers of few rows: sums of products straight from the weight as it lies in memory, each row of which is read
// once for all of them.
#include <algorithm>

#include "core/numerics/functions.hpp"
#include "cpu_ops/kernels/elements.hpp"
#include "cpu_ops/kernels/kernels.hpp"

namespace tandem::fast {
namespace {

constexpr int lanes = 32;
/// Outputs that a thread makes at once: few enough for an even share, enough to be worth a task.
constexpr std::int64_t outputs = 32;
/// Rows of x that share a reading of the weight: their sums have to stay in registers.
constexpr std::int64_t rows_at_once = 4;

template <class X, class Y>
struct RowsProduct {
  const X* x;
  const bf16* w;
  const bf16* bias;  ///< or null
  Y* y;
  std::int64_t rows, in, out;
};

/// Sums of one output for `rows` rows of x: lane i % 32 takes input i, then lanes pairwise at distances 16 ... 1. The
/// order is that of one row, however many there are.
template <int rows, class X>
inline void sum_products(const X* x, const bf16* w, std::int64_t in, float (&sums)[rows]) {
  float lane[rows][lanes] = {};
  std::int64_t i = 0;
  for (; i + lanes <= in; i += lanes) {
    float weight[lanes];
    for (int j = 0; j < lanes; ++j) weight[j] = numerics::bf16_to_float(w[i + j]);
    for (int r = 0; r < rows; ++r) {
      const X* const row = x + r * in + i;
      for (int j = 0; j < lanes; ++j) lane[r][j] = numerics::fma(to_float(row[j]), weight[j], lane[r][j]);
    }
  }
  for (int r = 0; r < rows; ++r) {
    for (std::int64_t rest = i; rest < in; ++rest) {
      float& sum = lane[r][rest - i];
      sum = numerics::fma(to_float(x[r * in + rest]), numerics::bf16_to_float(w[rest]), sum);
    }
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
      for (int j = 0; j < distance; ++j) lane[r][j] += lane[r][j + distance];
    }
    sums[r] = lane[r][0];
  }
}

template <int rows, class X, class Y>
inline void make_output(const RowsProduct<X, Y>& p, std::int64_t row, std::int64_t output) {
  float sums[rows];
  sum_products<rows>(p.x + row * p.in, p.w + output * p.in, p.in, sums);
  const float added = p.bias == nullptr ? 0.0F : to_float(p.bias[output]);
  for (int r = 0; r < rows; ++r) p.y[(row + r) * p.out + output] = from_float<Y>(sums[r] + added);
}

template <class X, class Y>
void make_outputs(const RowsProduct<X, Y>& p, std::int64_t begin, std::int64_t length) {
  vectorised([=] {
    for (std::int64_t output = begin; output < begin + length; ++output) {
      std::int64_t row = 0;
      for (; row + rows_at_once <= p.rows; row += rows_at_once) make_output<rows_at_once>(p, row, output);
      for (; row < p.rows; ++row) make_output<1>(p, row, output);
    }
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
