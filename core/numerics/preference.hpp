#pragma once
// Loss of a pair of sequences in direct preference optimization (arXiv 2305.18290, eq. 7), and its derivative.
#include <cmath>

#include "core/numerics/functions.hpp"

namespace tandem::numerics {

/// Sums of the losses of a pair's sequences, -log p of each, and their log-probabilities under the reference.
struct PreferenceSums {
  float chosen, rejected;
  float reference_chosen, reference_rejected;
};

/// Sum of a sequence's losses, in the order of its tokens.
inline float sum_of_losses(const float* losses, std::int64_t count) noexcept {
  double sum = 0.0;
  for (std::int64_t i = 0; i < count; ++i) sum += static_cast<double>(losses[i]);
  return static_cast<float>(sum);
}

struct PreferencePair {
  float loss;              ///< -log sigmoid(chosen - rejected)
  float chosen, rejected;  ///< rewards: beta (log p - log p of the reference)
  float slope;  ///< derivative of the loss by the sum of the chosen one's losses; the other's is its negative
};

/// Rewards and their difference are exact but for one rounding each. The loss is that of the rounded difference.
TANDEM_HD PreferencePair preference_pair(const PreferenceSums& sums, float beta) {
  const double scale = static_cast<double>(beta);
  const double chosen = -static_cast<double>(sums.chosen) - static_cast<double>(sums.reference_chosen);
  const double rejected = -static_cast<double>(sums.rejected) - static_cast<double>(sums.reference_rejected);
  const float margin = static_cast<float>(scale * (chosen - rejected));
  // e^-|margin| neither overflows nor loses what 1 - sigmoid would. A NaN passes through all of it.
  const float small = exp(margin < 0.0F ? margin : -margin);
  const float share = div(margin < 0.0F ? 1.0F : small, add(1.0F, small));
  const double more = margin < 0.0F ? -static_cast<double>(margin) : 0.0;
  return {static_cast<float>(more + std::log1p(static_cast<double>(small))), static_cast<float>(scale * chosen),
          static_cast<float>(scale * rejected), mul(beta, share)};
}

}  // namespace tandem::numerics
