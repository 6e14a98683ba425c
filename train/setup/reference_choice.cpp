#include "train/setup/reference_choice.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string_view>
#include <utility>

#include "core/base/error.hpp"

namespace tandem {
namespace {

/// Reason why steps cannot compute the reference; empty where they can.
std::string_view why_not_in_steps(const TrainConfig& config, const ModelSource& source) {
  if (!source.config.lora) return "the model itself is trained, and there are no adapters to leave out";
  if (!config.lora.modules_to_save.empty()) return "modules that are trained whole leave their first values";
  return {};
}

double seconds_of_steps(const RunPlan& plan, std::int64_t steps) {
  return static_cast<double>(steps) * plan.prediction->choice.simulation.step_seconds;
}

std::string seconds_in(std::int64_t steps, double seconds) {
  return fmt::format("{:.4g} s more in {}", std::max(0.0, seconds),
                     steps == 1 ? std::string("a step") : fmt::format("{} steps", steps));
}

/// Chooses by time, and says both.
RunPlan faster(RunPlan before, RunPlan step, const ReferenceWork& work) {
  const double beforehand = before.reference->before_seconds.value();
  const double more = seconds_of_steps(step, work.steps) - seconds_of_steps(before, work.steps);
  const bool in_step = more <= beforehand;
  const std::string of_steps = seconds_in(work.steps, more);
  RunPlan& chosen = in_step ? step : before;
  chosen.reference->before_seconds = beforehand;
  chosen.reference->added_seconds = more;
  chosen.reference->text =
      in_step ? fmt::format("in each step: predicted {} instead of {:.4g} s before them", of_steps, beforehand)
              : fmt::format("before the first step: predicted {:.4g} s instead of {}", beforehand, of_steps);
  return std::move(chosen);
}

/// Chooses without rates: forwards over layers that are streamed anyway cost no copy of their own.
RunPlan fewer_copies(RunPlan before, RunPlan step, const ReferenceWork& work) {
  const bool streams = step.plan.streams_weights();
  const bool in_step = streams || !work.repeats;
  RunPlan& chosen = in_step ? step : before;
  chosen.reference->text = !in_step  ? "before the first step, as records are used again"
                           : streams ? "in each step, whose layers are streamed anyway"
                                     : "in each step, as no record is used again";
  return std::move(chosen);
}

}  // namespace

bool steps_compute_reference(const TrainConfig& config, const ModelSource& source) {
  return why_not_in_steps(config, source).empty();
}

void settle_reference(TrainConfig& config, const ModelSource& source) {
  config.reference_has_adapter = source.adapter != nullptr || !config.adapter.empty();
  if (config.objective != Objective::dpo || config.dpo_reference == DpoReference::before) return;
  const std::string_view why = why_not_in_steps(config, source);
  if (why.empty()) return;
  if (config.dpo_reference == DpoReference::step) {
    throw UsageError("--dpo-reference step", why, "leave it out, and the reference is computed before the first step");
  }
  config.dpo_reference = DpoReference::before;
}

bool chooses_reference(const TrainConfig& config, const ModelConfig& model) noexcept {
  return config.objective == Objective::dpo && config.dpo_reference == DpoReference::automatic &&
         !config.sequences.has_scores && model.lora && config.lora.modules_to_save.empty();
}

ReferenceWork reference_work(const TrainConfig& config, int ranks) noexcept {
  const std::int64_t at_once = config.micro_batch * ranks, each = at_once * config.grad_accum;
  const auto up = [](std::int64_t n, std::int64_t by) { return (n + by - 1) / by; };
  const std::int64_t scored = config.sequences.scored > 0 ? config.sequences.scored : each;
  const double epochs = config.epochs > 0.0 ? config.epochs : 1.0;
  const auto in_epochs = static_cast<std::int64_t>(epochs * static_cast<double>(scored));
  ReferenceWork work;
  work.steps = config.steps > 0 ? config.steps : std::max<std::int64_t>(1, up(in_epochs, each));
  // How many records there are may not be known: then those of an epoch are a step's, and those of steps all theirs.
  const bool known = config.sequences.scored > 0 || config.steps == 0;
  const std::int64_t records = known ? scored : work.steps * each;
  work.passes = up(records, at_once);
  work.repeats = work.steps * each >= records + each;
  return work;
}

RunPlan cheaper_reference(const TrainConfig& config, int ranks,
                          const std::function<RunPlan(const TrainConfig&)>& plan) {
  const auto planned = [&](DpoReference way) {
    TrainConfig asked = config;
    asked.dpo_reference = way;
    return plan(asked);
  };
  const auto fitting = [&](DpoReference way) -> std::optional<RunPlan> {
    try {
      return planned(way);
    } catch (const PlanError&) {
      return std::nullopt;
    }
  };
  std::optional<RunPlan> before = fitting(DpoReference::before);  // holds a number for each record
  if (!before) return planned(DpoReference::step);
  std::optional<RunPlan> step = fitting(DpoReference::step);  // may hold adapters
  if (!step) return *std::move(before);
  const ReferenceWork work = reference_work(config, ranks);
  return step->prediction ? faster(*std::move(before), *std::move(step), work)
                          : fewer_copies(*std::move(before), *std::move(step), work);
}

}  // namespace tandem
