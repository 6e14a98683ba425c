#pragma once
// Choice of a token's experts, and the gradient of their weights. Shares are a softmax: of all logits, or of the chosen
// ones alone.
#include "core/numerics/ieee.hpp"

namespace tandem::numerics {

/// Value of a logit in the choice of experts: NaN is the least.
TANDEM_HD float weight_in_choice(float logit) { return logit == logit ? logit : bits_float(0xff800000u); }

/// Whether expert i of logit a is chosen before expert j of logit b: a total order, whatever the logits.
TANDEM_HD bool chosen_before(float a, std::int64_t i, float b, std::int64_t j) {
  const float u = weight_in_choice(a), v = weight_in_choice(b);
  return u > v || (u == v && i < j);
}

/// Gradient of a logit with probability `share`; `dshare` is the gradient of that (0 where the expert was not chosen)
/// and `mean` the sum of share times dshare over the chosen.
TANDEM_HD float logit_gradient(float share, float dshare, float mean) { return mul(share, dshare - mean); }

}  // namespace tandem::numerics
