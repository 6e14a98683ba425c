#pragma once
// A step in Prometheus' text format.
#include <cstdint>
#include <optional>
#include <string>

#include "train/report/run_directory.hpp"

namespace tandem {

struct RunMetrics {
  const StepMetrics& metrics;    ///< metrics of the last step
  std::int64_t steps = 0;        ///< the run is to take
  std::int64_t tokens = 0;       ///< targets so far
  std::int64_t skipped = 0;      ///< steps so far
  std::uint64_t speculated = 0;  ///< parameters updated before the norm was known, since the process began
  std::int64_t confirmed = 0;    ///< steps of which these stayed, likewise
  std::int64_t rolled_back = 0;  ///< steps of which these were taken back, likewise
  std::optional<double> eval_loss;
  std::optional<PairMetrics> eval_pairs{};
  std::string model;
  std::string device;
};

/// Ends in a newline. Values that are not finite are written as NaN.
std::string prometheus_text(const RunMetrics& run);

}  // namespace tandem
