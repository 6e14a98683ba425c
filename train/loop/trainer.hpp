#pragma once
// A run of `tandem train`, from its request to its summary.
#include <memory>
#include <string>

#include "train/loop/prepared_run.hpp"
#include "train/loop/train_request.hpp"

namespace tandem {

class RunOutput;
class StepLoop;

/// A run whose inputs have all been checked and whose memory is planned; nothing is on the disk yet.
class Trainer {
 public:
  /// Prepares the run; throws as PreparedRun.
  explicit Trainer(TrainRequest request);
  ~Trainer();

  /// Header and memory table, for people.
  std::string plan_text() const { return run_.plan_text(); }
  /// Whether this process speaks to people: of several, the first alone.
  bool speaks() const noexcept { return run_.processes->is_first(); }
  const RunSetup& setup() const noexcept { return run_.setup; }

  /// Trains, saves, and writes the summary. Blocks. Returns the number of the signal that ended it, or 0.
  /// Throws TrainingError where training cannot go on, WriteError, DeviceError. Once.
  int run();

 private:
  int run_alike();

  PreparedRun run_;
  std::unique_ptr<RunOutput> output_;
  std::unique_ptr<StepLoop> loop_;
};

}  // namespace tandem
