#pragma once
// Shape of a coded weight, from that of its values.
#include "core/numerics/weight_code.hpp"
#include "core/tensor/tensor.hpp"

namespace tandem {

/// `values`: (O, I), or (E, O, I) of E matrices.
inline CodedShape coded_shape(const Shape& values) noexcept {
  const int rank = values.rank();
  return {rank == 3 ? values[0] : 1, values[rank - 2], values[rank - 1]};
}

}  // namespace tandem
