// A failure anywhere reaches whoever waits, and nothing hangs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "core/base/error.hpp"
#include "core/base/stall.hpp"
#include "core/base/trace.hpp"
#include "tests/offload/idle_device.hpp"
#include "tests/offload/toy/trainer.hpp"

namespace tandem {
namespace {

using testing::toy;
using testing::ToyOptions;
using testing::ToyResult;
using testing::ToyTrainer;

class FailingStream : public ::testing::TestWithParam<const char*> {};

TEST_P(FailingStream, ReachesTheCallerAtEveryPosition) {
  if (!testing::takes_faults()) GTEST_SKIP() << "this device cannot be made to fail";
  const std::string victim = GetParam();
  int failures = 0;
  for (int position = 0; position < 60; position += 3) {
    auto seen = std::make_shared<std::atomic<int>>(0);
    auto armed = std::make_shared<std::atomic<bool>>(false);
    ToyOptions o = toy("interleave:2,resident=0.3");
    o.offload.resident_layers = 1;
    o.device.faults = std::make_shared<HostFaults>();
    o.device.faults->before_task = [=](std::string_view stream, std::string_view task) {
      if (!*armed || stream != victim || task == "record" || task == "wait") return;
      if ((*seen)++ == position) throw DeviceError("injected failure");
    };
    ToyTrainer t(o);
    *armed = true;
    ToyResult result;
    try {
      for (int s = 0; s < 3; ++s) t.step(s, result);
      t.engine().wait();
    } catch (const DeviceError& error) {
      EXPECT_THAT(error.what(), ::testing::HasSubstr(std::string(testing::injected_failure())));
      ++failures;
      // Half-updated state is never handed out.
      EXPECT_THROW((void)t.engine().state_digest(), Error);
    }
  }
  EXPECT_GT(failures, 3);
}

INSTANTIATE_TEST_SUITE_P(Streams, FailingStream,
                         ::testing::Values("host to device", "device to host", "device update", "compute"));

TEST(FailingUpdate, OnTheCpuReachesTheCallerAndLeavesNoState) {
  if (!testing::takes_faults()) GTEST_SKIP() << "this device cannot be made to fail";
  int failures = 0;
  for (int position = 0; position < 12; ++position) {
    ToyOptions o = toy("interleave:2");
    o.offload.subgroup_size = 2048;
    o.device.faults = std::make_shared<HostFaults>();
    o.device.faults->before_update = [position, seen = std::make_shared<std::atomic<int>>(0)] {
      if ((*seen)++ == position) throw DeviceError("injected failure");
    };
    ToyTrainer t(o);
    ToyResult result;
    try {
      for (int s = 0; s < 2; ++s) t.step(s, result);
      t.engine().wait();
      ADD_FAILURE() << "update " << position << " failed and nobody heard";
    } catch (const DeviceError& error) {
      EXPECT_STREQ(error.what(), "injected failure");
      ++failures;
    }
    // Whatever begins next is told the cause, also inside the step that failed and once that is dropped.
    const auto everything_throws = [&] {
      EXPECT_THROW((void)t.engine().state_digest(), DeviceError);
      EXPECT_THROW(t.engine().begin_step({}), DeviceError);
      EXPECT_THROW(OffloadEngine::Evaluation{t.engine()}, DeviceError);
      EXPECT_THROW((void)t.engine().begin_save(), DeviceError);
    };
    everything_throws();
    EXPECT_THROW(t.engine().abort_step(), Error);
    everything_throws();
  }
  EXPECT_EQ(failures, 12);
}

// Work of a caller's may throw anything, and no destructor passes it on.
TEST(FailingUpdate, OfAnyTypeReachesTheCallerAndEndsNoProgram) {
  if (!testing::takes_faults()) GTEST_SKIP() << "this device cannot be made to fail";
  for (const bool overlap : {true, false}) {
    ToyOptions o = toy("host");
    o.offload.overlap = overlap;
    o.device.faults = std::make_shared<HostFaults>();
    o.device.faults->before_update = [] { throw 42; };
    ToyTrainer t(o);
    ToyResult result;
    const auto train = [&] {
      for (int s = 0; s < 2; ++s) t.step(s, result);
      t.engine().wait();
    };
    EXPECT_THROW(train(), int);
  }
}

TEST(Watchdog, NamesWhoWaitsForWhat) {
  if (!testing::takes_faults()) GTEST_SKIP() << "this device cannot be made to stall";
  auto armed = std::make_shared<std::atomic<bool>>(false);
  ToyOptions o = toy("host");
  o.offload.resident_layers = 0;
  o.offload.watchdog_seconds = 0.5;
  o.device.faults = std::make_shared<HostFaults>();
  o.device.faults->before_task = [armed](std::string_view stream, std::string_view) {
    if (stream != "device to host") return;
    while (*armed) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  };
  ToyTrainer t(o);
  *armed = true;
  ToyResult result;
  try {
    t.step(0, result);
    ADD_FAILURE() << "the stall went unnoticed";
  } catch (const StalledError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("flush_gradient"), std::string::npos) << text;
    EXPECT_NE(text.find("waiting for gradients"), std::string::npos) << text;
  }
  *armed = false;
}

/// Whether somebody was told of a stall since the listener was made.
class StallListener {
 public:
  StallListener() {
    told = false;
    set_stall_handler([](const StalledError&) { told = true; });
  }
  ~StallListener() { set_stall_handler(nullptr); }
  static inline std::atomic<bool> told{false};
};

// Waits for work on memory of the caller's cannot be given up: whoever set a handler is told, and ends the process.
TEST(Watchdog, TellsOfTheEnginesOwnCopiesAndWaitsForThem) {
  if (!testing::takes_faults()) GTEST_SKIP() << "this device cannot be made to stall";
  auto stalls = std::make_shared<std::atomic<const char*>>("");
  ToyOptions o = toy("device");
  o.offload.watchdog_seconds = 0.3;
  o.offload.spare_host_memory = std::size_t{8} << 20;
  o.device.faults = std::make_shared<HostFaults>();
  o.device.faults->before_task = [stalls](std::string_view stream, std::string_view) {
    if (stream != stalls->load()) return;
    const double end = trace_now() + 20.0;
    while (!StallListener::told && trace_now() < end) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    *stalls = "";
  };
  const auto expect_told = [&](const char* stream, const std::function<void()>& call) {
    const StallListener listener;
    *stalls = stream;
    call();
    EXPECT_TRUE(StallListener::told) << stream;
  };
  std::optional<ToyTrainer> t;
  expect_told("setup", [&] { t.emplace(o); });
  const Parameter& p = *t->layout().owned_parameters().front();
  const auto count = static_cast<std::size_t>(p.count);
  // Pinned: a device may block in the call itself where memory is not, and nobody but it could tell.
  const MemoryBlock pinned = t->device().allocate_pinned(count * sizeof(float), "values");
  const std::span<float> values(static_cast<float*>(pinned.data()), count);
  const std::string digest = t->engine().state_digest();
  expect_told("state access", [&] { t->engine().read(p, StateArray::master, values); });
  expect_told("state access", [&] { t->engine().write(p, StateArray::master, values); });
  expect_told("relocation", [&] {
    OffloadOptions other = o.offload;
    other.policy = parse_policy("static:0.5");
    t->engine().adopt(make_plan(t->layout(), other, {t->device().info().capacity, 0}));
  });
  EXPECT_EQ(t->engine().state_digest(), digest);
}

// A stream beside the one that gradients come from, where nothing but the clock of exposed updates waits for it.
TEST(Watchdog, DoesNotWaitWithoutEndForAStreamOfTheCallers) {
  if (!testing::takes_faults()) GTEST_SKIP() << "this device cannot be made to stall";
  ToyOptions o = toy("host");
  o.offload.resident_layers = o.layers + 1;
  o.offload.watchdog_seconds = 0.5;
  o.device.faults = std::make_shared<HostFaults>();
  o.device.faults->before_update = [] { std::this_thread::sleep_for(std::chrono::milliseconds(5)); };
  ToyTrainer t(o);
  ToyResult result;
  t.step(0, result);
  std::atomic<bool> goes_on{false};  // the last work of the stream still reads it
  const Stream side = t.device().make_stream("side");
  const auto step = [&] {
    t.engine().begin_step({});
    {
      const WeightsGuard weights = t.engine().fetch(0, t.stream());
      const TensorView any = weights[t.layout().layer(0).parameters.front().name];
      t.toy_device().enqueue(side, "stands still", any, {}, [&goes_on](const bf16*, void*) {
        const double end = trace_now() + 20.0;
        while (!goes_on && trace_now() < end) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      });
    }
    { const WeightsGuard weights = t.engine().fetch(t.layout().layer_count() - 1, side); }
    for (int l = 0; l < t.layout().layer_count(); ++l) t.forward(l);
    for (int l = t.layout().layer_count() - 1; l >= 0; --l) t.backward(l, 1, 0);
    t.engine().end_step();
  };
  const auto stall_of = [](const std::function<void()>& call) -> std::string {
    try {
      call();
    } catch (const StalledError& error) {
      return error.what();
    }
    return "none";
  };
  const std::string first = stall_of(step);
  EXPECT_THAT(first, ::testing::HasSubstr("waiting for a stream"));
  EXPECT_EQ(stall_of([&] { t.engine().wait(); }), first) << "as every call from then on";
  goes_on = true;
}

/// Does nothing, and refuses to mark the end of a stream's work when told to.
class RefusingDevice final : public testing::IdleDevice {
 public:
  void record(EventView, StreamView) override {
    if (refuses) throw DeviceError("no more records");
  }
  std::atomic<bool> refuses{false};
};

// A guard that goes must not throw: what fails then is told by the next call, and not by the watchdog.
TEST(Guards, ThatCannotBeGivenBackEndTheRun) {
  for (const bool on_two_streams : {false, true}) {
    RefusingDevice device;
    ParameterLayout layout;
    for (const char* name : {"first", "last"}) layout.add_layer(name).add("w", {1000});
    OffloadOptions options;
    options.policy = parse_policy("host");
    options.watchdog_seconds = 0.5;
    OffloadEngine engine(device, layout, options, make_plan(layout, options, {device.info().capacity, 0}));
    engine.initialize([](const Parameter&, std::span<float>) {});
    const Stream stream = device.make_stream("compute");
    const Stream other = device.make_stream("other");
    engine.begin_step({});
    {
      WeightsGuard weights = engine.fetch(0, stream);
      if (on_two_streams) weights.also_used_on(other);
      device.refuses = true;
    }
    device.refuses = false;
    EXPECT_THROW(engine.wait(), DeviceError) << on_two_streams;
    EXPECT_THROW((void)engine.fetch(1, stream), DeviceError) << on_two_streams;
  }
}

TEST(Memory, ACeilingThatCannotFitIsRefusedBeforeAnythingIsAllocated) {
  ToyOptions o = toy("device");
  o.device.capacity = 100 << 10;
  try {
    ToyTrainer t(o);
    FAIL();
  } catch (const PlanError& error) {
    EXPECT_NE(error.table().find("weights, resident"), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("--device-memory"), std::string::npos);
  }
}

TEST(Pinning, RefusedIsNamedAndLeavesMemoryPageableWhereThatIsAsked) {
  if (!testing::takes_faults()) GTEST_SKIP() << "this device cannot be made to fail";
  ToyOptions o = toy("interleave:2");
  const ToyResult expected = testing::train_toy(o);
  o.device.pin = true;
  o.device.faults = std::make_shared<HostFaults>();
  o.device.faults->refuse_pinning = true;
  try {
    const ToyTrainer refused(o);
    FAIL();
  } catch (const DeviceError& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("cannot pin"));
    EXPECT_THAT(error.what(), ::testing::HasSubstr("'offload engine'"));
  }
  std::string said;
  o.device.pageable = [&](const std::string& what) { said = what; };
  ToyTrainer trainer(o);
  EXPECT_THAT(said, ::testing::HasSubstr("cannot pin"));
  EXPECT_EQ(trainer.engine().plan().memory.bytes_in(Place::pinned), 0U);
  EXPECT_EQ(trainer.engine().plan().memory.bytes_in(Place::pageable), expected.plan.memory.bytes_in(Place::pinned));
  EXPECT_EQ(trainer.run().digest, expected.digest);
}

}  // namespace
}  // namespace tandem
