#pragma once
// A cuBLASLt made of this CPU, under the real one's name: column-major products on host memory, as its documentation
// describes them. It refuses descriptions that do not fit together, and can be made to fail.
#include <cstdint>

namespace tandem::fake_cublaslt {

struct Counters {
  int choices = 0;   ///< calls of the heuristic
  int products = 0;  ///< products computed
  int fused = 0;     ///< of them with GELU or its gradient
  int fp8 = 0;       ///< of them of eight-bit factors
  int fast = 0;      ///< of them with fast accumulation
  int ragged =
      0;  ///< of them with a matrix whose columns, in its memory, are no whole packets of eight, and more than one
};
/// Since the last call of reset().
Counters counters();

struct Behaviour {
  bool has_algorithms = true;
  int product_status = 0;   ///< what every product returns
  int epilogue_status = 0;  ///< what the heuristic returns for GELU and its gradient
};
/// Zero counters, and this behaviour from now on.
void reset(Behaviour behaviour);

}  // namespace tandem::fake_cublaslt
