#pragma once
// Steps that `tandem bench` measures.
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "cli/bench/bench_rows.hpp"
#include "cli/common/step_modules.hpp"
#include "train/config/config.hpp"
#include "train/hf/model_source.hpp"
#include "train/runtime/loaded_model.hpp"
#include "train/runtime/module_ops.hpp"
#include "train/runtime/phase_clock.hpp"
#include "train/setup/run_setup.hpp"

namespace tandem {

/// A signal came while the machine or steps were measured.
struct BenchInterrupted {};

/// Drives one loaded model over tokens that are a function of seed, step and position alone.
class BenchSteps {
 public:
  /// Run, configuration and trace, which may be null, are kept by reference. Loads the model: PlanError, DeviceError.
  BenchSteps(RunSetup& run, const TrainConfig& config, const ModelSource& source, Trace* trace = nullptr);

  /// Medians over `steps` after one that is not counted. `apart`: updates end before the next forward begins, so that
  /// phases are those of compute alone. `dram_rate`: bytes a second that host memory moves, as calibrated. Blocks.
  /// Throws BenchInterrupted.
  MeasuredFigures measure(int steps, bool apart, double dram_rate);
  /// Measures `steps` steps, and between them as many whose modules are watched, after one of each. `trace`: the one
  /// that it was made with. Blocks. Throws BenchInterrupted.
  MeasuredStep measure_modules(int steps, Trace& trace);
  OffloadEngine& engine() { return loaded_.engine(); }

 private:
  double one(bool apart);
  double unwatched(double& compute);
  struct WatchedStep {
    double seconds = 0.0;
    StreamFigures parts;
  };
  WatchedStep watched(ModuleOps& ops, ModuleClock& clock);
  template <class Probe>
  StepReport step(Probe& probe, const std::function<void()>& end_of_backward);
  void fill(std::span<std::int32_t> tokens);
  double targets() const { return static_cast<double>(config_.micro_batch * config_.grad_accum * config_.seq_len); }

  RunSetup& run_;
  const TrainConfig& config_;
  LoadedModel loaded_;
  PhaseClock clock_;
  std::int64_t vocabulary_;
  std::size_t at_once_;  ///< micro-batches through a layer
  std::uint64_t state_ = 1;
};

}  // namespace tandem
