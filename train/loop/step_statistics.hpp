#pragma once
// Times and rates of a run's steps, each by itself and all together.
#include <cstdint>
#include <optional>
#include <vector>

#include "offload/engine/engine.hpp"
#include "train/loop/step_runner.hpp"
#include "train/report/run_directory.hpp"

namespace tandem {

/// Summary of all steps of a run, in seconds; empty where there were none.
struct StepSummary {
  std::optional<double> tokens_per_second;
  std::optional<double> step;
  std::optional<double> forward;
  std::optional<double> backward;
  std::optional<double> update;  ///< a mean: that of a step falls into the next one; the others are medians
  std::optional<double> exposed_update;
};

class StepStatistics {
 public:
  /// Bytes a second that the machine's memory moves; 0: unknown.
  explicit StepStatistics(double dram_rate) : dram_rate_(dram_rate) {}

  /// A step has ended: fills in what it took and used, of its metrics. `metrics.step_seconds` is there already.
  void note_step(StepMetrics& metrics, const StepResult& result, double forward, double backward,
                 const EngineCounters& counters);
  /// Starts to count for the next step: `counters` so far belong to earlier ones.
  void begin_step(const EngineCounters& counters) { before_ = counters; }
  /// Counters when the last step began.
  const EngineCounters& before() const noexcept { return before_; }

  bool empty() const noexcept { return step_.empty(); }
  StepSummary summary() const;

 private:
  double dram_rate_;
  std::vector<double> step_, forward_, backward_, update_, exposed_, rate_;
  EngineCounters before_;
};

}  // namespace tandem
