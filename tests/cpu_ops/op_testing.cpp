#include "tests/cpu_ops/op_testing.hpp"

namespace tandem::testing {
namespace {

template <class F>
void for_values(const Tensor& tensor, const F& use) {
  const TensorView view = tensor.view();
  const std::int64_t count = view.shape.count();
  if (view.dtype == DType::bf16) {
    const bf16* const values = view.as<bf16>();
    for (std::int64_t i = 0; i < count; ++i) use(i, static_cast<double>(numerics::bf16_to_float(values[i])));
  } else {
    const float* const values = view.as<float>();
    for (std::int64_t i = 0; i < count; ++i) use(i, static_cast<double>(values[i]));
  }
}

/// Writes `value(i)` to each element i, in order.
template <class F>
void fill(const Tensor& tensor, const F& value) {
  const TensorView view = tensor.view();
  const std::int64_t count = view.shape.count();
  if (view.dtype == DType::bf16) {
    bf16* const values = view.as<bf16>();
    for (std::int64_t i = 0; i < count; ++i) values[i] = numerics::round_to_bf16(value(i));
  } else {
    float* const values = view.as<float>();
    for (std::int64_t i = 0; i < count; ++i) values[i] = value(i);
  }
}

std::vector<double> values_of(const Tensor& tensor) {
  std::vector<double> values(static_cast<std::size_t>(tensor.count()));
  for_values(tensor, [to = values.data()](std::int64_t i, double value) { to[i] = value; });
  return values;
}

}  // namespace

Tensor rounded(const Tensor& sums) {
  Tensor t(DType::bf16, sums.view().shape);
  const std::vector<double> values = values_of(sums);
  fill(t, [from = values.data()](std::int64_t i) { return static_cast<float>(from[i]); });
  return t;
}

float Random::normal(float deviation) { return deviation * std::normal_distribution<float>()(engine_); }

Tensor Random::tensor(DType dtype, Shape shape, float deviation) {
  Tensor t(dtype, shape);
  fill(t, [&](std::int64_t) { return normal(deviation); });
  return t;
}

double relative_error(const Tensor& actual, const Tensor& expected) {
  const std::vector<double> found = values_of(actual);
  double largest = 0.0, difference = 0.0;
  bool ordered = true;
  for_values(expected, [&, values = found.data()](std::int64_t i, double value) {
    largest = std::max(largest, std::abs(value));
    const double d = std::abs(values[i] - value);
    ordered = ordered && !std::isnan(d);
    difference = std::max(difference, d);
  });
  if (!ordered) return INFINITY;
  return largest == 0.0 ? difference : difference / largest;
}

}  // namespace tandem::testing
