#pragma once
// One step by modules and by the engine's work beside them, as predicted and, where it was watched, as measured.
#include <array>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/trace.hpp"
#include "train/runtime/module_clock.hpp"
#include "train/setup/run_plan.hpp"

namespace tandem {

/// A kind of module in a step of all micro-batches.
struct ModuleRow {
  ModuleKind kind = ModuleKind::embedding;
  PassWork forward, backward;
  BoundSeconds forward_bounds, backward_bounds;  ///< predicted
  std::optional<PartFigures> measured;

  double predicted_seconds() const noexcept { return forward_bounds.total() + backward_bounds.total(); }
  /// Measured where it was, else predicted.
  double seconds() const noexcept { return measured ? measured->seconds() : predicted_seconds(); }
  /// The figure of the machine that takes most of the predicted time, and the share of `seconds()` that it alone would
  /// take: 1 is as fast as that figure allows.
  WorkBound bound() const noexcept;
  double bound_share() const noexcept;
};

/// Work of the engine in a step, beside the modules or while they wait: seconds in which its lanes were busy.
struct EngineFigures {
  double seconds = 0.0;
  double bytes = 0.0;  ///< bytes copied
};
struct EngineRow {
  std::string name;  ///< "gradient path", "copies to the device"
  EngineFigures predicted;
  std::optional<EngineFigures> measured;
  std::string bound;         ///< resource that bounds it: "device to host"; empty where no single one does
  double bound_share = 0.0;  ///< share of its time that this resource alone would take; 0: unknown

  double seconds() const noexcept { return measured ? measured->seconds : predicted.seconds; }
};

/// Measured times of a step, medians or means over steps.
struct MeasuredStep {
  int steps = 0;
  double step_seconds = 0.0;        ///< a step that nobody watched
  double compute_seconds = 0.0;     ///< its work of the model's stream, without waits, as the engine counts it
  double watched_seconds = 0.0;     ///< a step whose modules were watched
  StreamFigures parts{};            ///< parts of the watched step
  std::vector<Trace::Total> tasks;  ///< engine's tasks in `traced_steps`, watched or not
  int traced_steps = 0;
};

struct StepModules {
  std::vector<ModuleRow> modules;  ///< modules of the model, widest first
  std::vector<EngineRow> engine;   ///< rows of the engine's tasks, widest first
  double predicted_step_seconds = 0.0;
  std::optional<MeasuredStep> measured;

  double predicted_seconds() const noexcept;  ///< sum of the modules
  double measured_seconds() const noexcept;
  /// Sum of the modules over the compute time of a step that nobody watched. Needs `measured`.
  double modules_over_step() const noexcept { return measured_seconds() / measured->compute_seconds; }
};

/// A step of a run with a prediction.
StepModules step_modules(const RunPlan& run, const SequenceFacts& sequences,
                         std::optional<MeasuredStep> measured = std::nullopt);
nlohmann::ordered_json json_of(const StepModules& step);
/// Table for people.
std::string table_of(const StepModules& step);

}  // namespace tandem
