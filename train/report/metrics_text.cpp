#include "train/report/metrics_text.hpp"

#include <fmt/format.h>

#include <cmath>
#include <string_view>

#include "core/base/version.hpp"

namespace tandem {
namespace {

std::string number(double value) { return std::isfinite(value) ? fmt::format("{}", value) : "NaN"; }

std::string label(std::string_view text) {
  std::string result;
  for (const char c : text) {
    if (c == '\\' || c == '"') result += '\\';
    result += c == '\n' ? std::string("\\n") : std::string(1, c);
  }
  return result;
}

}  // namespace

std::string prometheus_text(const RunMetrics& run) {
  const StepMetrics& m = run.metrics;
  std::string text;
  const auto add = [&](std::string_view name, std::string_view type, std::string_view help, double value,
                       const std::string& labels = {}) {
    text += fmt::format("# HELP {0} {1}\n# TYPE {0} {2}\n{0}{3} {4}\n", name, help, type, labels, number(value));
  };
  add("tandem_run_info", "gauge", "What is being trained; always 1.", 1.0,
      fmt::format("{{version=\"{}\",model=\"{}\",device=\"{}\"}}", label(version), label(run.model),
                  label(run.device)));
  const auto count = [](auto value) { return static_cast<double>(value); };
  add("tandem_steps_total", "counter", "Steps taken, skipped ones included.", count(m.step));
  add("tandem_steps_planned", "gauge", "Steps that the run is to take.", count(run.steps));
  add("tandem_tokens_total", "counter", "Target tokens trained on, padding not counted.", count(run.tokens));
  add("tandem_skipped_steps_total", "counter", "Steps that left no trace.", count(run.skipped));
  add("tandem_speculated_parameters_total", "counter",
      "Parameters updated before the gradient norm was known, since the process began.", count(run.speculated));
  add("tandem_confirmed_steps_total", "counter", "Steps whose updates ran before the norm was known, and stayed.",
      count(run.confirmed));
  add("tandem_rolled_back_steps_total", "counter",
      "Steps whose updates ran before the norm was known, and were taken back.", count(run.rolled_back));
  add("tandem_loss", "gauge", "Mean loss of the last step's targets.", m.loss);
  if (m.pairs) {
    add("tandem_reward_margin", "gauge", "Mean reward margin of the last step's pairs.", m.pairs->margin);
    add("tandem_reward_accuracy", "gauge", "Share of the last step's pairs told right.", m.pairs->accuracy);
  }
  add("tandem_gradient_norm", "gauge", "Global norm of the last step's gradient, before clipping.", m.grad_norm);
  add("tandem_learning_rate", "gauge", "Of the last step.", m.lr);
  add("tandem_step_seconds", "gauge", "Duration of the last step.", m.step_seconds);
  add("tandem_tokens_per_second", "gauge", "Target tokens a second in the last step.", m.tokens_per_second);
  add("tandem_device_bytes", "gauge", "Device memory held.", count(m.device_bytes));
  if (run.eval_loss) add("tandem_eval_loss", "gauge", "Validation loss, as last evaluated.", *run.eval_loss);
  if (run.eval_pairs) {
    add("tandem_eval_reward_margin", "gauge", "Mean reward margin, as last evaluated.", run.eval_pairs->margin);
    add("tandem_eval_reward_accuracy", "gauge", "Share of pairs told right, as last evaluated.",
        run.eval_pairs->accuracy);
  }
  return text;
}

}  // namespace tandem
