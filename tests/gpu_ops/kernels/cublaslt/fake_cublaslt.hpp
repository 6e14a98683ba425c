#pragma once
// A cuBLASLt made of this CPU, under the real one's name: column-major products on host memory, as its documentation
// describes them. It refuses descriptions that do not fit together, and can be made to fail.
#include <cstdint>

namespace tandem::fake_cublaslt {

struct Counters {
  int choices = 0;   ///< calls of the heuristic
  int products = 0;  ///< products computed
};
/// Since the last call of reset().
Counters counters();

struct Behaviour {
  bool has_algorithms = true;
  int product_status = 0;  ///< what every product returns
};
/// Zero counters, and this behaviour from now on.
void reset(Behaviour behaviour);

}  // namespace tandem::fake_cublaslt
