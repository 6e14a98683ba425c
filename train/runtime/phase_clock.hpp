#pragma once
// Clock of phases: when the device gets from one to the next, without anybody stopping for it.
#include <array>
#include <cstdint>
#include <vector>

#include "core/device/stream_marks.hpp"
#include "core/params/parameter_access.hpp"

namespace tandem {

enum class Phase : std::uint8_t { idle, forward, backward };

class PhaseClock {
 public:
  /// `device` must outlive the clock, whose end waits until all marks have passed.
  PhaseClock(Device& device, double watchdog_seconds) : marks_(device, watchdog_seconds) {}

  /// Begins `phase` at this point of `stream`, until the next mark. Does not block. One stream at a time.
  void mark(Phase phase, StreamView stream);
  /// Waits until all marks have passed and gives the seconds of each phase since the last call.
  /// A failed stream ends the waiting; the error itself reaches whoever uses the stream. Throws StalledError where it
  /// stands still for `watchdog_seconds`.
  void finish_forward_and_backward(double& forward, double& backward);

 private:
  StreamMarks marks_;
  std::vector<Phase> phases_;  ///< phases that begin with the marks
  Phase current_ = Phase::idle;
  double since_ = 0.0;
};

/// Passes everything on to `inner`, and marks the end of forward where the first gradient buffer behind it is
/// asked for. Guards that it hands out belong to `inner`.
class PhaseProbe final : public ParameterAccess {
 public:
  PhaseProbe(ParameterAccess& inner, PhaseClock& clock) : inner_(inner), clock_(clock) {}
  /// Begins the forward of one micro-batch, or of several at once.
  void begin_forward(StreamView stream);
  WeightsGuard fetch(int layer, StreamView stream) override { return inner_.fetch(layer, stream); }
  GradientsGuard gradients(int layer, StreamView stream) override;

 protected:
  void also_used(std::uint64_t, StreamView) override;
  void release(std::uint64_t, StreamView) noexcept override {}
  void commit(std::uint64_t, StreamView) override;
  void abandon(std::uint64_t) noexcept override {}

 private:
  ParameterAccess& inner_;
  PhaseClock& clock_;
  bool in_backward_ = false;
};

}  // namespace tandem
