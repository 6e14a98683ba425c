#include "train/loop/step_statistics.hpp"

#include <numeric>

#include "core/base/median.hpp"

namespace tandem {
namespace {

std::optional<double> median_of(const std::vector<double>& values) {
  return values.empty() ? std::nullopt : std::optional(median(values));
}

std::optional<double> mean(const std::vector<double>& values) {
  if (values.empty()) return std::nullopt;
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

}  // namespace

void StepStatistics::note_step(StepMetrics& metrics, const StepResult& result, double forward, double backward,
                               const EngineCounters& counters) {
  step_.push_back(metrics.step_seconds);
  forward_.push_back(forward);
  backward_.push_back(backward);
  update_.push_back(counters.update_seconds - before_.update_seconds);
  metrics.exposed_update_seconds = result.report.exposed_update_seconds;
  exposed_.push_back(metrics.exposed_update_seconds);
  metrics.speculated_parameters = counters.parameters_speculated - before_.parameters_speculated;
  metrics.speculation = counters.confirmed_steps > before_.confirmed_steps       ? "confirmed"
                        : counters.rolled_back_steps > before_.rolled_back_steps ? "rolled_back"
                                                                                 : "";
  metrics.use = use_between(before_, counters, metrics.step_seconds, dram_rate_);
  metrics.tokens_per_second = static_cast<double>(result.targets) / metrics.step_seconds;
  rate_.push_back(metrics.tokens_per_second);
}

StepSummary StepStatistics::summary() const {
  return {.tokens_per_second = median_of(rate_),
          .step = median_of(step_),
          .forward = median_of(forward_),
          .backward = median_of(backward_),
          .update = mean(update_),
          .exposed_update = median_of(exposed_)};
}

}  // namespace tandem
