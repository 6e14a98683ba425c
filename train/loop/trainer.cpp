#include "train/loop/trainer.hpp"

#include <spdlog/spdlog.h>

#include <utility>

#include "train/loop/run_output.hpp"
#include "train/loop/step_loop.hpp"
#include "train/runtime/stop_signal.hpp"

namespace tandem {

Trainer::Trainer(TrainRequest request) : run_(std::move(request)) {}

Trainer::~Trainer() = default;

int Trainer::run() {
  return run_.processes->or_fail([this] { return run_alike(); });
}

/// The part of one process, which all play alike.
int Trainer::run_alike() {
  output_ = std::make_unique<RunOutput>(run_);
  std::string text = plan_text();
  text.pop_back();
  output_->line(text);
  if (!run_.source.loads_weights() && !run_.checkpoint) {
    output_->line("random weights: the model starts from scratch");
  }
  if (run_.config().policy.kind == Policy::Kind::automatic && !run_.setup.prediction) {
    spdlog::info(
        "--policy auto: this machine is not calibrated, so as much as fits is on the device; `tandem calibrate` "
        "lets it choose the predicted fastest");
  }
  if (run_.config().out.empty()) spdlog::warn("no --out: nothing of this run is saved");
  const StopSignal signals;
  output_->serve_metrics();
  loop_ = std::make_unique<StepLoop>(run_, *output_);
  return loop_->run();
}

}  // namespace tandem
