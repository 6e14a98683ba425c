#pragma once
// Shape of a coded weight, from the view that its values are written to.
#include "core/numerics/weight_code.hpp"
#include "core/tensor/tensor.hpp"

namespace tandem {

/// `weight`: (O, I), or (E, O, I) of E matrices.
inline CodedShape coded_shape(const TensorView& weight) {
  const int rank = weight.shape.rank();
  return {rank == 3 ? weight.shape[0] : 1, weight.shape[rank - 2], weight.shape[rank - 1]};
}

}  // namespace tandem
