#include "train/runtime/phase_clock.hpp"

#include <utility>

#include "core/base/error.hpp"

namespace tandem {

void PhaseClock::mark(Phase phase, StreamView stream) {
  marks_.set(stream);
  phases_.push_back(phase);
}

void PhaseClock::finish_forward_and_backward(double& forward, double& backward) {
  const std::vector<double>& passed = marks_.take();
  std::array<double, 3> seconds{};
  for (std::size_t i = 0; i < phases_.size(); ++i) {
    seconds[static_cast<std::size_t>(current_)] += passed[i] - std::exchange(since_, passed[i]);
    current_ = phases_[i];
  }
  phases_.clear();
  forward = seconds[static_cast<std::size_t>(Phase::forward)];
  backward = seconds[static_cast<std::size_t>(Phase::backward)];
}

void PhaseProbe::begin_forward(StreamView stream) {
  in_backward_ = false;
  clock_.mark(Phase::forward, stream);
}

GradientsGuard PhaseProbe::gradients(int layer, StreamView stream) {
  if (!in_backward_) clock_.mark(Phase::backward, stream);
  in_backward_ = true;
  return inner_.gradients(layer, stream);
}

void PhaseProbe::also_used(std::uint64_t, StreamView) { throw MisuseError("a phase probe hands out no guards"); }
void PhaseProbe::commit(std::uint64_t, StreamView) { throw MisuseError("a phase probe hands out no guards"); }

}  // namespace tandem
