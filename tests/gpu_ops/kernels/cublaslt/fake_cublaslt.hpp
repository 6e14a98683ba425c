#pragma once
// A cuBLASLt made of this CPU, under the real one's name: column-major products on host memory, as its documentation
// describes them. It refuses descriptions that do not fit together, and can be made to fail.
#include <cstdint>

namespace tandem::fake_cublaslt {

struct Counters {
  int choices = 0;   ///< calls of the heuristic
  int products = 0;  ///< products computed
  int fused = 0;     ///< products with GELU or its gradient
  int fp8 = 0;       ///< products of eight-bit factors
  int fast = 0;      ///< products with fast accumulation
  int ragged =
      0;  ///< products with a matrix whose columns, in memory, exceed a packet of eight and are no whole packets
};
/// Since the last call of reset().
Counters counters();

struct Behaviour {
  bool has_algorithms = true;
  int product_status = 0;   ///< status that every product returns
  int epilogue_status = 0;  ///< status that the heuristic returns for GELU and its gradient
};
/// Zero counters, and this behaviour from now on.
void reset(Behaviour behaviour);

}  // namespace tandem::fake_cublaslt
