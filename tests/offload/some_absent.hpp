#pragma once
// A pattern of parameters without a gradient, for toys of four steps and two micro-batches.
#include "core/params/parameter_layout.hpp"

namespace tandem::testing {

/// Absent gradients: in step 1 all of layer h.1, in its first micro-batch; in step 2 `w` of h.2, and all of h.0, whose
/// layer is not asked for; of the first layer its bias in each odd step.
inline bool some_absent(int step, int micro, const Parameter& p) {
  if (step == 1 && micro == 0 && p.full_name.starts_with("h.1.")) return true;
  if (step == 2 && (p.full_name == "h.2.w" || p.full_name.starts_with("h.0."))) return true;
  return step % 2 == 1 && p.full_name == "first.bias";
}

}  // namespace tandem::testing
