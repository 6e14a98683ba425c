#include "train/phase_clock.hpp"

#include <chrono>
#include <exception>

#include "core/error.hpp"
#include "core/trace.hpp"

namespace tandem {

PhaseClock::PhaseClock(Device& device) : device_(device), thread_([this] { watch(); }) {}

PhaseClock::~PhaseClock() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

Event PhaseClock::take_event() {
  const std::lock_guard lock(mutex_);
  if (spare_.empty()) return device_.make_event();
  Event event = std::move(spare_.back());
  spare_.pop_back();
  return event;
}

void PhaseClock::mark(Phase phase, StreamView stream) {
  Mark mark{take_event(), phase};
  device_.record(mark.event, stream);
  {
    const std::lock_guard lock(mutex_);
    marks_.push_back(std::move(mark));
  }
  changed_.notify_all();
}

void PhaseClock::watch() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stop_ || !marks_.empty(); });
    if (marks_.empty()) return;
    Mark mark = std::move(marks_.front());
    marks_.pop_front();
    busy_ = true;
    bool passed = false;
    while (!passed && !stop_) {
      lock.unlock();
      try {
        passed = device_.wait_for(mark.event, std::chrono::milliseconds(100));
      } catch (const std::exception&) {
        passed = true;  // its owner hears of it at the stream's next use
      }
      lock.lock();
    }
    const double now = trace_now();
    seconds_[static_cast<std::size_t>(current_)] += now - since_;
    since_ = now;
    current_ = mark.phase;
    spare_.push_back(std::move(mark.event));
    busy_ = false;
    changed_.notify_all();
    if (stop_) return;
  }
}

void PhaseClock::finish_forward_and_backward(double& forward, double& backward) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return stop_ || (marks_.empty() && !busy_); });
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
