// Work that runs side by side, shown without a clock: one task is held back until another has begun, and would wait for
// ever if the two were not in flight at once.
#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "tests/offload/toy/trainer.hpp"

namespace tandem {
namespace {

using testing::toy;
using testing::toy_layout;
using testing::ToyOptions;
using testing::ToyResult;
using testing::ToyTrainer;

/// Counts what begins on each stream, and holds a task until a condition on the counts is met.
class Stagehand {
 public:
  using Condition = std::function<bool(const Stagehand&)>;

  /// `limit` only ends a test that has failed.
  explicit Stagehand(std::chrono::milliseconds limit = std::chrono::seconds(20)) : limit_(limit) {}

  /// Holds the `number`th (from 1) task of that name on that stream.
  void hold(const std::string& stream, const std::string& task, int number, Condition until) {
    holds_[{stream + "/" + task, number}] = std::move(until);
  }
  int begun(const std::string& stream, const std::string& task) const {
    const auto found = begun_.find(stream + "/" + task);
    return found == begun_.end() ? 0 : found->second;
  }
  void install(ToyOptions& o) {
    o.device.faults = std::make_shared<HostFaults>();
    o.device.faults->before_task = [this](std::string_view stream, std::string_view task) { begin(stream, task); };
  }
  int never() const { return never_; }
  int held() const { return held_; }

 private:
  void begin(std::string_view stream, std::string_view task) {
    std::unique_lock lock(mutex_);
    const std::string name = std::string(stream) + "/" + std::string(task);
    const int number = ++begun_[name];
    changed_.notify_all();
    const auto hold = holds_.find({name, number});
    if (hold == holds_.end()) return;
    ++held_;
    if (!changed_.wait_for(lock, limit_, [&] { return hold->second(*this); })) ++never_;
  }

  std::chrono::milliseconds limit_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, int> begun_;
  std::map<std::pair<std::string, int>, Condition> holds_;
  int never_ = 0;
  int held_ = 0;
};

const std::string up = "host to device", down = "device to host", update = "device update";
const std::string copy_up = "copy to device", copy_down = "copy to host";

/// Every subgroup streamed, all weights resident: the copies are of state alone.
ToyOptions streamed() {
  ToyOptions o = toy("stream");
  o.offload.resident_layers = 6;
  o.offload.subgroup_size = 1024;
  o.steps = 2;
  return o;
}

struct StepShape {
  int subgroups = 0;
  int copies = 0;  ///< copies that load one subgroup
};
StepShape shape_of(const ToyOptions& o) {
  const Plan plan = make_plan(toy_layout(o), o.offload, {o.device.capacity, 0});
  return {static_cast<int>(plan.subgroups.size()), plan.subgroups.front().gradient_on_device ? 3 : 4};
}

TEST(Overlap, TheNextSubgroupIsLoadedWhileOneUpdates) {
  ToyOptions o = streamed();
  const StepShape shape = shape_of(o);
  Stagehand stage;
  for (int n = 1; n < shape.subgroups; ++n) {
    stage.hold(update, "adamw", n, [=](const Stagehand& s) { return s.begun(up, copy_up) > n * shape.copies; });
  }
  stage.install(o);
  ToyTrainer(o).run();
  EXPECT_EQ(stage.held(), shape.subgroups - 1);
  EXPECT_EQ(stage.never(), 0);
}

TEST(Overlap, BothDirectionsAreInFlightAtOnce) {
  ToyOptions o = streamed();
  const StepShape shape = shape_of(o);
  Stagehand stage;
  const int third_load = 2 * shape.copies + 1;
  const int first_store = shape.subgroups + 1;  // behind the gradients, or their norms
  stage.hold(up, copy_up, third_load, [&](const Stagehand& s) { return s.begun(down, copy_down) >= first_store; });
  stage.hold(down, copy_down, first_store, [&](const Stagehand& s) { return s.begun(up, copy_up) >= third_load; });
  stage.install(o);
  ToyTrainer(o).run();
  EXPECT_EQ(stage.held(), 2);
  EXPECT_EQ(stage.never(), 0);
}

TEST(Overlap, ALayersGradientsLeaveBeforeTheNextBackwardEnds) {
  ToyOptions o = toy("host");
  o.steps = 1;
  o.tied = false;
  Stagehand stage;
  // Two parameters with gradients in each layer: the second task of a layer is held until the layers behind it
  // (one piece each) are on their way out.
  for (int layer = 1; layer < 6; ++layer) {
    stage.hold("compute", "toy backward", 2 * layer + 2,
               [=](const Stagehand& s) { return s.begun(down, copy_down) >= layer; });
  }
  stage.install(o);
  ToyTrainer(o).run();
  EXPECT_EQ(stage.held(), 5);
  EXPECT_EQ(stage.never(), 0);
}

TEST(Overlap, ForwardBeginsWhileLaterLayersUpdateAndEachLayerAwaitsItsOwn) {
  ToyOptions o = streamed();
  o.tied = false;
  const StepShape shape = shape_of(o);
  Stagehand stage;
  constexpr int forward_tasks = 2 + 4 * 3 + 2;  // tasks of one step: one for every parameter
  stage.hold(update, "adamw", shape.subgroups,
             [=](const Stagehand& s) { return s.begun("compute", "toy forward") > forward_tasks; });
  bool own_update_begun = false;
  stage.hold("compute", "toy forward", 2 * forward_tasks, [&](const Stagehand& s) {
    own_update_begun = s.begun(update, "adamw") >= shape.subgroups;
    return true;
  });
  stage.install(o);
  ToyTrainer(o).run();
  EXPECT_EQ(stage.held(), 2);
  EXPECT_EQ(stage.never(), 0);
  EXPECT_TRUE(own_update_begun);
}

/// Seconds of three steps' updates on a CPU that takes its time, and what of the first two the later steps' forward
/// waits for, where a first layer's forward takes `busy`.
std::pair<double, double> update_and_exposed(std::chrono::milliseconds busy) {
  ToyOptions o = toy("host");
  o.steps = 3;
  o.device.update_parameters_per_second = static_cast<double>(toy_layout(o).state_elements()) / 0.1;
  o.device.faults = std::make_shared<HostFaults>();
  const int forward_tasks = 2 + 4 * 3 + 2;
  o.device.faults->before_task = [=, begun = 0](std::string_view stream, std::string_view task) mutable {
    if (stream == "compute" && task == "toy forward" && begun++ % forward_tasks == 0) std::this_thread::sleep_for(busy);
  };
  const ToyResult result = ToyTrainer(o).run();
  EXPECT_EQ(result.exposed.front(), 0.0);
  return {result.counters.update_seconds, result.exposed[1] + result.exposed[2]};
}

TEST(Overlap, ExposedIsWhatTheStreamStandsStillForTheUpdate) {
  const auto [alone, exposed] = update_and_exposed(std::chrono::milliseconds(0));
  const auto [beside, hidden] = update_and_exposed(std::chrono::milliseconds(300));
  EXPECT_GT(exposed, 0.5 * alone) << "two of three updates, and nothing to do meanwhile";
  EXPECT_LE(exposed, alone);
  EXPECT_LT(hidden, 0.5 * beside) << "the thread waits as long, but the stream has work";
}

// The stage itself: with overlap switched off the same condition is never met.
TEST(Overlap, IsMissedWhereThereIsNone) {
  ToyOptions o = streamed();
  o.offload.overlap = false;
  const StepShape shape = shape_of(o);
  Stagehand stage(std::chrono::milliseconds(200));
  constexpr int forward_tasks = 2 + 4 * 3 + 2;
  stage.hold(update, "adamw", shape.subgroups,
             [=](const Stagehand& s) { return s.begun("compute", "toy forward") > forward_tasks; });
  stage.install(o);
  ToyTrainer(o).run();
  EXPECT_EQ(stage.never(), 1);
}

}  // namespace
}  // namespace tandem
