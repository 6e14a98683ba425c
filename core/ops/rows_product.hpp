#pragma once
// Operands of a linear layer of few rows, as kernels of every processor take them.
#include <cstdint>

#include "core/numerics/bf16.hpp"

namespace tandem {

/// y (rows, out) = x (rows, in) w^T + bias, w (out, in). Not owned.
template <class X, class Y>
struct RowsProduct {
  const X* x;
  const bf16* w;
  const bf16* bias;  ///< or null
  Y* y;
  std::int64_t rows, in, out;
};

}  // namespace tandem
