#pragma once
// Output of a run for people and programs while it goes on.
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "comm/metrics_server.hpp"
#include "train/loop/prepared_run.hpp"
#include "train/report/progress.hpp"
#include "train/report/run_directory.hpp"

namespace tandem {

class RunOutput {
 public:
  /// `run` must outlive it.
  explicit RunOutput(const PreparedRun& run);

  /// Opens the endpoint for metrics where the run is to have one. Throws what MetricsServer throws.
  void serve_metrics();
  void line(const std::string& text);
  /// A step has been taken. `saving`: share of a checkpoint under way. `directory`: whose metrics.jsonl has it too;
  /// null: none. Throws WriteError.
  void step(const StepMetrics& metrics, std::optional<double> saving, RunDirectory* directory);

 private:
  const PreparedRun& run_;
  Progress progress_;
  std::unique_ptr<MetricsServer> metrics_server_;
  std::uint64_t speculated_ = 0;  ///< parameters, of the steps that were served
  std::int64_t confirmed_ = 0;    ///< steps, likewise
  std::int64_t rolled_back_ = 0;
};

}  // namespace tandem
