#include "train/loop/run_output.hpp"

#include <fmt/format.h>

#include "train/report/metrics_text.hpp"

namespace tandem {

RunOutput::RunOutput(const PreparedRun& run)
    : run_(run),
      progress_(run.config().steps, run.config().log_every, run.request.quiet || !run.processes->is_first()) {}

void RunOutput::line(const std::string& text) {
  progress_.line(text);
  if (run_.log) run_.log->line(text);
}

void RunOutput::serve_metrics() {
  const TrainConfig& config = run_.config();
  if (config.metrics_port < 0 || !run_.processes->is_first()) return;
  metrics_server_ = std::make_unique<MetricsServer>(config.metrics_address, config.metrics_port);
  line(fmt::format("metrics at {}", metrics_server_->url()));
}

void RunOutput::step(const StepMetrics& metrics, std::optional<double> saving, RunDirectory* directory) {
  progress_.step(metrics, saving);
  if (run_.log) {
    run_.log->line(fmt::format("step {} loss {:.4f} norm {:.4f} {:.3f} s", metrics.step, metrics.loss,
                               metrics.grad_norm, metrics.step_seconds));
  }
  if (directory != nullptr) directory->append(metrics);
  if (!metrics_server_) return;
  speculated_ += metrics.speculated_parameters;
  confirmed_ += metrics.speculation == "confirmed" ? 1 : 0;
  rolled_back_ += metrics.speculation == "rolled_back" ? 1 : 0;
  metrics_server_->publish(prometheus_text({.metrics = metrics,
                                            .steps = run_.config().steps,
                                            .tokens = run_.record.tokens,
                                            .skipped = run_.record.skipped,
                                            .speculated = speculated_,
                                            .confirmed = confirmed_,
                                            .rolled_back = rolled_back_,
                                            .eval_loss = run_.record.eval_loss,
                                            .eval_pairs = run_.record.eval_pairs,
                                            .model = run_.setup.model_config.name,
                                            .device = run_.setup.device_names()}));
}

}  // namespace tandem
