#pragma once
// One element of a view at a time, in double, whatever its type.
#include <vector>

#include "core/ops/ops.hpp"

namespace tandem::reference {

inline double get(const void* data, DType dtype, std::int64_t i) {
  if (dtype == DType::bf16) return static_cast<double>(numerics::bf16_to_float(static_cast<const bf16*>(data)[i]));
  return static_cast<double>(static_cast<const float*>(data)[i]);
}
inline void put(void* data, DType dtype, std::int64_t i, double value) {
  const float rounded = static_cast<float>(value);
  if (dtype == DType::bf16) {
    static_cast<bf16*>(data)[i] = numerics::round_to_bf16(rounded);
  } else {
    static_cast<float*>(data)[i] = rounded;
  }
}

inline double get(const TensorView& view, std::int64_t i) { return get(view.data, view.dtype, i); }
inline void put(const TensorView& view, std::int64_t i, double value) { put(view.data, view.dtype, i, value); }
inline void add_to(const TensorView& view, std::int64_t i, double value) { put(view, i, get(view, i) + value); }
/// Adds or writes a parameter's gradient: f32 is added to, bf16 written.
inline void add_or_write(const TensorView& view, std::int64_t i, double value) {
  if (view.dtype == DType::f32) return add_to(view, i, value);
  put(view, i, value);
}

/// All elements of a view.
inline std::vector<double> values_of(const TensorView& view) {
  std::vector<double> values(static_cast<std::size_t>(view.shape.count()));
  double* const to = values.data();
  for (std::int64_t i = 0; i < view.shape.count(); ++i) to[i] = get(view, i);
  return values;
}
/// sum[i] += factor * values[i], for i < n: each sum grows by one product a call, in the order of the calls.
inline void add_products(double* sum, double factor, const double* values, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) sum[i] += factor * values[i];
}

}  // namespace tandem::reference
