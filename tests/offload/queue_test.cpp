// Copies are queued ahead of the buffers that they wait for.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "offload/engine/engine.hpp"
#include "scheduler/tasks/task_graph.hpp"
#include "tests/offload/bare_step.hpp"
#include "tests/offload/idle_device.hpp"
#include "tests/offload/least_memory.hpp"

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
  void record(EventView event, StreamView stream) override {
    const std::lock_guard lock(mutex_);
    if (silent_) ends_[stream.impl()->name()].push_back({stream.impl(), event.impl()});
  }
  void wait(StreamView stream, EventView event) override {
    const std::lock_guard lock(mutex_);
    if (silent_) waits_.emplace(stream.impl(), event.impl());
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
  /// Tasks queued on streams of this name since the device fell silent.
  int queued(const std::string& stream) {
    const std::lock_guard lock(mutex_);
    return queued_[stream];
  }
  /// Ends of what was queued on streams of this name since the device fell silent: the stream, and the event that marks
  /// its end.
  using End = std::pair<StreamImpl*, EventImpl*>;
  std::vector<End> ends(const std::string& stream) {
    const std::lock_guard lock(mutex_);
    return ends_[stream];
  }
  bool waits(StreamImpl* stream, EventImpl* event) {
    const std::lock_guard lock(mutex_);
    return waits_.contains({stream, event});
  }

 private:
  std::mutex mutex_;
  bool silent_ = false;
  std::vector<std::function<void(std::exception_ptr)>> kept_;
  std::map<std::string, int> queued_;
  std::map<std::string, std::vector<End>> ends_;
  std::set<std::pair<StreamImpl*, EventImpl*>> waits_;
};

/// Number of tasks queued on streams of this name, once it no longer changes; waits for some seconds at most while it
/// is 0.
int settled_queue(SilentDevice& device, const char* stream) {
  int now = device.queued(stream);
  for (int before = -1, looks = 0; now != before || (now == 0 && looks < 100); ++looks) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    before = std::exchange(now, device.queued(stream));
  }
  return now;
}

/// Model of two layers whose state passes through few buffers, since little memory is left for them.
struct StreamedState {
  explicit StreamedState(const Device& device) {
    for (const char* name : {"first", "last"}) layout.add_layer(name).add("w", {200000});
    options.policy = parse_policy("stream");
    options.subgroup_size = 4096;
    plan = make_plan(layout, options, testing::on_least_memory(layout, options, {device.info().capacity, 0}));
  }
  ParameterLayout layout;
  OffloadOptions options;
  Plan plan;
};

/// Ends a step, of whose updates the device does not tell.
void update_in_silence(SilentDevice& device, OffloadEngine& engine) {
  engine.initialize([](const Parameter&, std::span<float>) {});
  const Stream stream = device.make_stream("compute");
  testing::begin_bare_step(engine, 2, stream);
  engine.wait();
  device.be_silent();
  engine.end_step();
}

constexpr std::pair<const char*, Lane> lanes[] = {{"host to device", Lane::host_to_device},
                                                  {"device update", Lane::device},
                                                  {"device to host", Lane::device_to_host}};

// Beside an update on all cores the engine's threads may not run for milliseconds: so long the streams go on alone.
// Buffers of state are freed by the streams' own order, without a word of the host's.
TEST(WorkQueuedAhead, IsMoreThanThereAreBuffers) {
  SilentDevice device;
  const StreamedState state(device);
  ASSERT_LT(state.plan.state_buffers, queued_ahead(Lane::device));
  OffloadEngine engine(device, state.layout, state.options, state.plan);
  update_in_silence(device, engine);
  for (const auto& [stream, lane] : lanes) {
    EXPECT_EQ(settled_queue(device, stream), queued_ahead(lane)) << stream;
  }
  device.tell();
  engine.wait();
}

// A copy engine serves a stream for as long as that has copies: behind the engine's, those of the caller's stream would
// wait for the end of all updates.
TEST(WorkQueuedAhead, GoesOverToAnotherStreamAfterAFewCopies) {
  SilentDevice device;
  const StreamedState state(device);
  OffloadEngine engine(device, state.layout, state.options, state.plan);
  update_in_silence(device, engine);
  for (const auto& [stream, lane] : lanes) {
    EXPECT_EQ(settled_queue(device, stream), queued_ahead(lane)) << stream;
    const std::vector<SilentDevice::End> ends = device.ends(stream);
    int in_a_row = 0, most = 0, changes = 0;
    for (std::size_t i = 0; i < ends.size(); ++i) {
      const bool changed = i > 0 && ends[i].first != ends[i - 1].first;
      in_a_row = changed ? 1 : in_a_row + 1;
      most = std::max(most, in_a_row);
      changes += changed ? 1 : 0;
      EXPECT_TRUE(!changed || device.waits(ends[i].first, ends[i - 1].second)) << stream << ", copy " << i;
    }
    EXPECT_EQ(most, lane == Lane::device ? queued_ahead(lane) : 4) << stream;
    EXPECT_EQ(changes > 0, lane != Lane::device) << stream;
  }
  device.tell();
  engine.wait();
}

}  // namespace
}  // namespace tandem
