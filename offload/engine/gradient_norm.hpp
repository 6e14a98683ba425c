#pragma once
// The global norm of a step's gradients.
#include <vector>

#include "offload/engine/engine_parts.hpp"

namespace tandem {

class GradientNorm {
 public:
  /// `parts` must outlive it.
  explicit GradientNorm(EngineParts& parts) : parts_(parts) {}

  /// Waits for the gradients. Each addition waits for the one before, several milliseconds for billions of parameters,
  /// and nothing is updated before the last: so each layer's blocks are added while backward goes on below it.
  double wait();

 private:
  double squares_of(LayerIndex layer);
  double add_squares(LayerIndex layer, double sum) const;

  EngineParts& parts_;
  IndexedVector<LayerIndex, double> squares_;  ///< sum of squares of each layer's gradients
};

}  // namespace tandem
