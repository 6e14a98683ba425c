#include <gtest/gtest.h>

#include <chrono>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "offload/engine.hpp"
#include "scheduler/task_graph.hpp"
#include "tests/offload/idle_device.hpp"

namespace tandem {
namespace {

/// Keeps to itself what it has done, until it is told to tell.
class SilentDevice final : public testing::IdleDevice {
 public:
  void call_after(StreamView stream, std::function<void(std::exception_ptr)> then) override {
    {
      const std::lock_guard lock(mutex_);
      if (silent_) {
        ++queued_[stream.impl()->name()];
        return kept_.push_back(std::move(then));
      }
    }
    then(nullptr);
  }
  void be_silent() {
    const std::lock_guard lock(mutex_);
    silent_ = true;
  }
  void tell() {
    std::vector<std::function<void(std::exception_ptr)>> kept;
    {
      const std::lock_guard lock(mutex_);
      silent_ = false;
      kept.swap(kept_);
    }
    for (const auto& then : kept) then(nullptr);
  }
  /// Since it is silent.
  int queued(const std::string& stream) {
    const std::lock_guard lock(mutex_);
    return queued_[stream];
  }

 private:
  std::mutex mutex_;
  bool silent_ = false;
  std::vector<std::function<void(std::exception_ptr)>> kept_;
  std::map<std::string, int> queued_;
};

/// Blocks until the number stays as it is, and for seconds at most while it is none.
template <class Number>
int settled(const Number& number) {
  int now = number();
  for (int before = -1, looks = 0; now != before || (now == 0 && looks < 100); ++looks) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    before = std::exchange(now, number());
  }
  return now;
}

// Beside an update on all cores the engine's threads may not run for milliseconds: so long the streams go on alone.
// State passes through four buffers, which their own order frees, without a word of the host's.
TEST(WorkQueuedAhead, IsMoreThanThereAreBuffers) {
  SilentDevice device;
  ParameterLayout layout;
  for (const char* name : {"first", "last"}) layout.add_layer(name).add("w", {200000});
  OffloadOptions options;
  options.policy = parse_policy("stream");
  options.subgroup_size = 4096;
  OffloadEngine engine(device, layout, options, make_plan(layout, options, {device.info().capacity, 0}));
  ASSERT_LT(engine.plan().state_buffers, queued_ahead);
  engine.initialize([](const Parameter&, std::span<float>) {});
  const Stream stream = device.make_stream("compute");
  engine.begin_step({});
  for (const int layer : {1, 0}) {
    const WeightsGuard weights = engine.fetch(layer, stream);
    engine.gradients(layer, stream).commit(stream);
  }
  engine.wait();
  device.be_silent();
  engine.end_step();
  EXPECT_EQ(settled([&] { return device.queued("host to device"); }), queued_ahead);
  EXPECT_EQ(settled([&] { return device.queued("device update"); }), queued_ahead);
  EXPECT_EQ(settled([&] { return device.queued("device to host"); }), queued_ahead);
  device.tell();
  engine.wait();
}

}  // namespace
}  // namespace tandem
