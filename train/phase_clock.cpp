#include "train/phase_clock.hpp"

#include <exception>

#include "core/error.hpp"
#include "core/trace.hpp"

namespace tandem {

PhaseClock::~PhaseClock() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return ahead_ == 0; });
}

void PhaseClock::mark(Phase phase, StreamView stream) {
  // What failed the stream reaches its owner at its next use.
  device_.call_after(stream, [this, phase](std::exception_ptr) { enter(phase); });
  // Counted last: a mark that was refused is not waited for. The stream may have passed it by now.
  const std::lock_guard lock(mutex_);
  ++ahead_;
}

void PhaseClock::enter(Phase phase) {
  const std::lock_guard lock(mutex_);
  const double now = trace_now();
  seconds_[static_cast<std::size_t>(current_)] += now - since_;
  since_ = now;
  current_ = phase;
  --ahead_;
  changed_.notify_all();  // while the lock is held: the clock may go as soon as it is not
}

void PhaseClock::finish_forward_and_backward(double& forward, double& backward) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return ahead_ == 0; });
  forward = seconds_[static_cast<std::size_t>(Phase::forward)];
  backward = seconds_[static_cast<std::size_t>(Phase::backward)];
  seconds_ = {};
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
