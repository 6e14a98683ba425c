#pragma once
// Metrics of preferences.

namespace tandem {

/// How far a model tells the preferred answers from the others, by its rewards.
struct PairMetrics {
  double margin = 0.0;    ///< reward of the chosen answer less that of the rejected one, mean over pairs
  double accuracy = 0.0;  ///< share of the pairs where it is above 0
};

}  // namespace tandem
