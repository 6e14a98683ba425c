#include "offload/engine/engine_steps.hpp"

#include <fmt/format.h>

#include <cmath>
#include <exception>

#include "core/base/error.hpp"
#include "core/ops/update_kernels.hpp"

namespace tandem {

void EngineSteps::end() {
  if (pass_.kind == OpenPass::Kind::step) pass_.abandon(parts_, "an engine ended inside a step");
  wait();
}

void EngineSteps::require_idle(const char* what) {
  parts_.executor.require_good();
  if (pass_.kind == OpenPass::Kind::step && pass_.abandoned) abort_step();
  if (pass_.kind == OpenPass::Kind::none) return;
  const bool step = pass_.kind == OpenPass::Kind::step;
  throw MisuseError(fmt::format("{} inside {}", what, step ? "a step" : "an evaluation"), {},
                    step ? "end it, or call abort_step" : "let its scope end");
}

void EngineSteps::wait() {
  held_.require_none("waiting for updates");
  parts_.executor.drain("waiting for updates");
}

// -- steps -----------------------------------------------------------------------------------------------

void EngineSteps::require_options(const StepOptions& options) const {
  if (!std::isfinite(options.lr) || !std::isfinite(options.gradient_scale) || !(options.max_grad_norm >= 0.0)) {
    throw MisuseError(fmt::format("a step of lr {}, gradient scale {}, clipped at {}", options.lr,
                                  options.gradient_scale, options.max_grad_norm),
                      "the first two are finite, the last is not negative");
  }
  if (options.micro_batches < 1 || options.micro_batches > parts_.plan.max_micro_batches) {
    throw MisuseError(fmt::format("a step of {} micro-batches", options.micro_batches),
                      fmt::format("the plan allows 1 to {}", parts_.plan.max_micro_batches),
                      "plan with OffloadOptions::max_micro_batches");
  }
}

void EngineSteps::begin_step(const StepOptions& options) {
  require_idle("begin_step");
  status_.require_whole();
  require_options(options);
  options_ = options;
  pass_.kind = OpenPass::Kind::step;
  stalled_until(0.0);  // forget the stalls of a step that was abandoned
  parts_.lowering->forget_before(parts_.executor.oldest());
  // Nothing of a step need wait for its norm where that neither scales nor takes back an update.
  update_in_backward_ = options.max_grad_norm <= 0.0 && parts_.options.on_nonfinite == OnNonfinite::stop;
  parts_.lowering->begin_step(options.micro_batches, update_in_backward_);
  if (update_in_backward_) set_update(options.gradient_scale);
  parts_.prefetch();
  parts_.submit();
}

/// Seconds that the caller's streams stood still in fetches up to `end`.
double EngineSteps::stalled_until(double end) {
  try {
    return parts_.stalls.take(end);
  } catch (...) {  // one of them stands still for good
    parts_.give_up(std::current_exception());
    throw;
  }
}

void EngineSteps::abort_step() {
  if (pass_.kind != OpenPass::Kind::step) throw MisuseError("abort_step without a step");
  held_.require_none("abort_step");
  pass_ = {};  // also where what failed is thrown again
  parts_.executor.drain("abandoning the step");
  if (update_in_backward_ && !parts_.lowering->norm_tasks().empty()) status_.is = StateStatus::Is::unfinished;
  parts_.lowering->end_pass();
}

void EngineSteps::require_complete() const {
  if (pass_.kind != OpenPass::Kind::step) throw MisuseError("end_step without a step");
  held_.require_none("end_step");
  if (pass_.abandoned) throw MisuseError("end_step of an abandoned step", {}, "call abort_step");
  if (!parts_.lowering->gradients_complete()) {
    throw MisuseError("end_step before every layer has committed its gradients in every micro-batch");
  }
}

StepReport EngineSteps::end_step() {
  require_complete();
  StepReport report;
  report.gradient_norm = std::abs(options_.gradient_scale) * norm_.wait();
  report.exposed_update_seconds = stalled_until(parts_.updates.ended());
  const bool finite = std::isfinite(report.gradient_norm);
  parts_.lowering->end_pass();
  pass_.kind = OpenPass::Kind::none;
  if (!finite && parts_.options.on_nonfinite == OnNonfinite::stop) {
    if (update_in_backward_) status_.is = StateStatus::Is::unfinished;
    throw TrainingError(fmt::format("update {}: the gradient norm is not finite", status_.step + 1), {},
                        "lower the learning rate, or go on from the last checkpoint");
  }
  report.skipped = !finite;
  if (finite) {
    if (!update_in_backward_) set_update(options_.gradient_scale * clip_factor(report.gradient_norm));
    ++status_.step;
    parts_.lowering->update(parts_.tasks);
    parts_.submit();
    if (!parts_.options.overlap) report.exposed_update_seconds += parts_.executor.drain("waiting for updates");
  } else {
    ++skipped_;
  }
  report.step = status_.step;
  return report;
}

double EngineSteps::clip_factor(double norm) const {
  const double limit = options_.max_grad_norm;
  return limit > 0.0 && norm > limit ? limit / norm : 1.0;
}

void EngineSteps::set_update(double scale) {
  const OffloadOptions& options = parts_.options;
  parts_.runner.set_update({options.adamw, status_.step + 1, options.seed, options_.lr, scale},
                           parts_.lowering->step());
}

// -- evaluations -----------------------------------------------------------------------------------------

void EngineSteps::begin_evaluation() {
  require_idle("evaluation");
  status_.require_whole();
  pass_.kind = OpenPass::Kind::evaluation;
  parts_.lowering->forget_before(parts_.executor.oldest());
  parts_.lowering->begin_evaluation();
  parts_.prefetch();
  parts_.submit();
}

void EngineSteps::end_evaluation() noexcept {
  parts_.lowering->end_pass();
  pass_.kind = OpenPass::Kind::none;
}

}  // namespace tandem
