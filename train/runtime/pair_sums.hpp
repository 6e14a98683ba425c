#pragma once
// Sums over pairs of sequences, of which one was preferred, as PreferenceLoss::pairs has them.
#include <cstddef>
#include <cstdint>
#include <span>

#include "train/config/pair_metrics.hpp"

namespace tandem {

class PairSums {
 public:
  /// Adds pairs, three values each.
  void add(std::span<const float> pairs) noexcept {
    for (std::size_t i = 0; i + 2 < pairs.size(); i += 3) {
      const double margin = static_cast<double>(pairs[i + 1]) - static_cast<double>(pairs[i + 2]);
      loss_ += static_cast<double>(pairs[i]);
      margin_ += margin;
      right_ += margin > 0.0 ? 1 : 0;
      ++count_;
    }
  }
  std::int64_t count() const noexcept { return count_; }
  /// Means over the pairs; NaN where there are none.
  double loss() const noexcept { return loss_ / static_cast<double>(count_); }
  PairMetrics metrics() const noexcept {
    return {margin_ / static_cast<double>(count_), static_cast<double>(right_) / static_cast<double>(count_)};
  }

 private:
  double loss_ = 0.0, margin_ = 0.0;
  std::int64_t right_ = 0, count_ = 0;
};

}  // namespace tandem
