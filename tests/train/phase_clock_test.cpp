// Seconds of forward and backward as the stream passes them.
#include "train/runtime/phase_clock.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>

#include "core/base/error.hpp"
#include "core/base/trace.hpp"
#include "cpu_ops/device/host_device.hpp"

namespace tandem {
namespace {

using namespace std::chrono_literals;

class PhaseClockTest : public ::testing::Test {
 protected:
  void sleep_on_stream(std::chrono::milliseconds time) {
    device_.enqueue(stream_, "sleep", [time] { std::this_thread::sleep_for(time); });
  }

  HostDevice device_{{.threads = 1, .update_threads = 1}};
  Stream stream_ = device_.make_stream("compute");
};

TEST_F(PhaseClockTest, GivesEachPhaseWhatTheStreamSpendsInIt) {
  PhaseClock clock(device_, 0.5);
  const double begin = trace_now();
  double forward = 0.0, backward = 0.0;
  for (int step = 0; step < 2; ++step) {
    sleep_on_stream(20ms);  // belongs to neither
    clock.mark(Phase::forward, stream_);
    sleep_on_stream(30ms);
    clock.mark(Phase::backward, stream_);
    sleep_on_stream(60ms);
    clock.mark(Phase::idle, stream_);
    clock.finish_forward_and_backward(forward, backward);
    EXPECT_GE(forward, 0.030);
    EXPECT_GE(backward, 0.060) << "step " << step;
  }
  // A phase that kept time of another would leave too little for the rest.
  EXPECT_LE(forward + backward + 2 * 0.020 + 0.090, trace_now() - begin);
}

TEST_F(PhaseClockTest, AddsUpWhatComesInPieces) {
  PhaseClock clock(device_, 0.5);
  for (int micro_batch = 0; micro_batch < 3; ++micro_batch) {
    clock.mark(Phase::forward, stream_);
    sleep_on_stream(10ms);
    clock.mark(Phase::backward, stream_);
    sleep_on_stream(5ms);
  }
  clock.mark(Phase::idle, stream_);
  double forward = 0.0, backward = 0.0;
  clock.finish_forward_and_backward(forward, backward);
  EXPECT_GE(forward, 0.030);
  EXPECT_GE(backward, 0.015);
  clock.finish_forward_and_backward(forward, backward);
  EXPECT_EQ(forward, 0.0);
  EXPECT_EQ(backward, 0.0);
}

TEST_F(PhaseClockTest, DoesNotWaitForAStreamThatFailed) {
  double forward = 0.0, backward = 0.0;
  {
    PhaseClock clock(device_, 0.5);
    clock.mark(Phase::forward, stream_);
    device_.enqueue(stream_, "fail", [] { throw std::runtime_error("broken"); });
    clock.mark(Phase::backward, stream_);
    clock.mark(Phase::idle, stream_);
    clock.finish_forward_and_backward(forward, backward);
    clock.mark(Phase::forward, stream_);  // nor does its end
  }
  EXPECT_THROW(device_.synchronize(stream_), std::runtime_error);
}

TEST_F(PhaseClockTest, DoesNotWaitWithoutEndForAStreamThatStandsStill) {
  PhaseClock clock(device_, 0.3);
  std::atomic<bool> goes_on{false};
  clock.mark(Phase::forward, stream_);
  device_.enqueue(stream_, "stands still", [&] {
    const double end = trace_now() + 20.0;
    while (!goes_on && trace_now() < end) std::this_thread::sleep_for(1ms);
  });
  clock.mark(Phase::idle, stream_);
  double forward = 0.0, backward = 0.0;
  EXPECT_THROW(clock.finish_forward_and_backward(forward, backward), StalledError);
  goes_on = true;
  clock.finish_forward_and_backward(forward, backward);
  EXPECT_GE(forward, 0.3) << "the marks are still there";
}

TEST_F(PhaseClockTest, DoesNotWaitForAMarkThatWasRefused) {
  PhaseClock clock(device_, 0.5);
  EXPECT_THROW(clock.mark(Phase::forward, StreamView()), MisuseError);
  double forward = 0.0, backward = 0.0;
  clock.finish_forward_and_backward(forward, backward);
}

}  // namespace
}  // namespace tandem
