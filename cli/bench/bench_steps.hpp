#pragma once
// Steps that `tandem bench` measures.
#include <cstdint>
#include <span>

#include "cli/bench/bench_rows.hpp"
#include "train/config/config.hpp"
#include "train/hf/model_source.hpp"
#include "train/runtime/loaded_model.hpp"
#include "train/runtime/phase_clock.hpp"
#include "train/setup/run_setup.hpp"

namespace tandem {

/// A signal came while the machine or steps were measured.
struct BenchInterrupted {};

/// Drives one loaded model over tokens that are a function of seed, step and position alone.
class BenchSteps {
 public:
  /// Both are kept by reference. Loads the model: PlanError, DeviceError.
  BenchSteps(RunSetup& run, const TrainConfig& config, const ModelSource& source);

  /// Medians over `steps` after one that is not counted. `apart`: updates end before the next forward begins, so that
  /// phases are those of compute alone. `dram_rate`: bytes a second that host memory moves, as calibrated. Blocks.
  /// Throws BenchInterrupted.
  MeasuredFigures measure(int steps, bool apart, double dram_rate);
  OffloadEngine& engine() { return loaded_.engine(); }

 private:
  double one(bool apart);
  void fill(std::span<std::int32_t> tokens);
  double targets() const { return static_cast<double>(config_.micro_batch * config_.grad_accum * config_.seq_len); }

  const TrainConfig& config_;
  LoadedModel loaded_;
  PhaseClock clock_;
  std::int64_t vocabulary_;
  std::size_t at_once_;  ///< micro-batches through a layer
  std::uint64_t state_ = 1;
};

}  // namespace tandem
