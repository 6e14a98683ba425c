#pragma once
// Record of a run: how far it has come, and its losses on the way.
#include <cstdint>
#include <optional>

#include "io/manifest.hpp"
#include "train/config/pair_metrics.hpp"

namespace tandem {

struct RunRecord {
  /// The record in a checkpoint's manifest; the beginning of a run where the manifest holds none.
  static RunRecord of(const Manifest& manifest);
  /// Writes the fields that checkpoints carry on.
  void write_to(Manifest& manifest) const;
  /// Takes down the loss of an evaluation of the state that is there now.
  void note_evaluation(double loss);
  /// Whether the state that is there now has been evaluated.
  bool evaluated() const noexcept { return evaluated_step == step; }

  std::int64_t step = 0;    ///< steps taken, skipped ones included
  std::int64_t tokens = 0;  ///< targets
  std::int64_t skipped = 0;
  std::optional<std::int64_t> resumed_from{};
  std::optional<double> first_loss{};
  std::optional<double> last_loss{};
  std::optional<PairMetrics> last_pairs{};  ///< metrics of the pairs of the last step here with a loss
  std::optional<PairMetrics> eval_pairs{};  ///< metrics of the evaluation at `evaluated_step`
  std::optional<double> eval_loss{};        ///< loss of the evaluation at `evaluated_step`
  std::int64_t evaluated_step = -1;
  std::optional<double> best_loss{};  ///< best loss of an evaluation
  std::int64_t best_step = 0;
  std::optional<double> lowest_eval_loss{};   ///< lowest loss of those that were due; empty: none
  std::int64_t evaluations_without_gain = 0;  ///< evaluations in a row whose loss was not lower
  std::int64_t counted_evaluation = 0;        ///< step of the last one that counts for both; 0: none yet
};

}  // namespace tandem
