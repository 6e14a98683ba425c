// Order of work on the streams of the host device.
#include "cpu_ops/device/host_device.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <future>
#include <mutex>
#include <numeric>
#include <thread>
#include <vector>

#include "core/base/error.hpp"
#include "core/ops/ops.hpp"
#include "core/ops/update_kernels.hpp"
#include "tests/cpu_ops/host_device_testing.hpp"

namespace tandem {
namespace {

using namespace literals;
using namespace std::chrono_literals;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

// -- order --------------------------------------------------------------------------------------------

TEST(HostStream, RunsWorkInTheOrderOfTheCalls) {
  HostDevice device(small());
  Stream stream = device.make_stream("compute");
  EXPECT_EQ(StreamView(stream).impl()->name(), "compute");
  std::vector<int> seen;
  for (int i = 0; i < 1000; ++i) device.enqueue(stream, "append", [&seen, i] { seen.push_back(i); });
  device.synchronize(stream);
  std::vector<int> expected(1000);
  std::iota(expected.begin(), expected.end(), 0);
  EXPECT_EQ(seen, expected);
}

TEST(HostStream, CallsDoNotBlock) {
  HostDevice device(small());
  const MemoryBlock block = device.allocate(64, "block");
  std::array<std::byte, 64> host{};
  Gate gate;
  Stream stream = device.make_stream("a");
  Stream other = device.make_stream("b");
  Event event = device.make_event();
  device.enqueue(stream, "gate", gate.task());
  device.copy(block.data(), host.data(), 64, CopyKind::host_to_device, stream);
  device.fill_zero(block.data(), 64, stream);
  device.record(event, stream);
  device.wait(other, event);
  EXPECT_FALSE(device.wait_for(event, 5ms)) << "reached although its stream stands still";
  gate.open();
  device.synchronize(other);
  EXPECT_TRUE(device.wait_for(event, 0ms));
}

TEST(HostStream, OneStreamDoesNotHoldUpAnother) {
  HostDevice device(small());
  Gate gate;
  Stream slow = device.make_stream("slow");
  Stream fast = device.make_stream("fast");
  device.enqueue(slow, "gate", gate.task());
  bool ran = false;
  device.enqueue(fast, "run", [&] { ran = true; });
  device.synchronize(fast);
  EXPECT_TRUE(ran);
  gate.open();
  device.synchronize(slow);
}

TEST(HostStream, AnEventOrdersWorkAcrossStreams) {
  HostDevice device(small());
  Gate gate;
  Stream a = device.make_stream("a");
  Stream b = device.make_stream("b");
  Event event = device.make_event();
  int value = 0;
  int seen = -1;
  device.enqueue(a, "gate", gate.task());
  device.enqueue(a, "write", [&] { value = 42; });
  device.record(event, a);
  device.wait(b, event);
  device.enqueue(b, "read", [&] { seen = value; });
  gate.open();
  device.synchronize(b);
  EXPECT_EQ(seen, 42);
}

TEST(HostStream, AWaitMeansTheRecordOfItsTime) {
  HostDevice device(small());
  Gate later;
  Stream a = device.make_stream("a");
  Stream b = device.make_stream("b");
  Event event = device.make_event();
  device.record(event, a);
  device.wait(b, event);
  device.enqueue(a, "gate", later.task());
  device.record(event, a);  // moves the mark for those who wait from now on
  device.synchronize(b);    // would hang if the wait had followed the mark
  EXPECT_FALSE(device.wait_for(event, 1ms));
  later.open();
  EXPECT_TRUE(device.wait_for(event, 10s));
}

TEST(HostStream, ARecordOnAnotherStreamDoesNotCompleteAnEarlierOne) {
  HostDevice device(small());
  Gate gate;
  Stream a = device.make_stream("a");
  Stream b = device.make_stream("b");
  Stream c = device.make_stream("c");
  Event event = device.make_event();
  int value = 0;
  int seen = 0;
  device.enqueue(a, "gate", gate.task());
  device.enqueue(a, "write", [&] { value = 7; });
  device.record(event, a);
  device.wait(c, event);
  device.record(event, b);
  EXPECT_TRUE(device.wait_for(event, 10s)) << "the last record is on an idle stream";
  device.enqueue(c, "read", [&] { seen = value; });
  gate.open();
  device.synchronize(c);
  EXPECT_EQ(seen, 7);
}

TEST(HostStream, AnEventMayGoWhileOthersWaitForIt) {
  HostDevice device(small());
  Gate gate;
  Stream a = device.make_stream("a");
  Stream b = device.make_stream("b");
  {
    Event event = device.make_event();
    device.enqueue(a, "gate", gate.task());
    device.record(event, a);
    device.wait(b, event);
  }
  gate.open();
  device.synchronize(b);
}

TEST(HostStream, RefusesWorkThatIsNoneOrOnAnothersStream) {
  HostDevice device(small());
  HostDevice other(small());
  Stream stream = device.make_stream("a");
  Stream foreign = other.make_stream("foreign");
  EXPECT_THROW(device.enqueue(stream, "empty", nullptr), MisuseError);
  EXPECT_THAT([&] { device.enqueue(foreign, "x", [] {}); }, ThrowsMessage<MisuseError>(HasSubstr("'foreign'")));
}

TEST(HostStream, ATaskThatWaitsForItsOwnStreamFailsInsteadOfHanging) {
  HostDevice device(small());
  Stream stream = device.make_stream("a");
  device.enqueue(stream, "self", [&] { device.synchronize(stream); });
  EXPECT_THAT([&] { device.synchronize(stream); }, ThrowsMessage<MisuseError>(HasSubstr("itself")));
}

TEST(HostStream, TasksMayQueueTasks) {
  HostDevice device(small());
  std::vector<int> seen;
  {
    Stream stream = device.make_stream("a");
    const StreamView view = stream;
    device.enqueue(stream, "outer", [&, view] {
      seen.push_back(1);
      device.enqueue(view, "inner", [&] { seen.push_back(2); });
    });
  }
  EXPECT_THAT(seen, ElementsAre(1, 2));
}

TEST(HostStream, ClosuresAreGoneOnceTheWorkIsDone) {
  HostDevice device(small());
  Stream stream = device.make_stream("a");
  for (int i = 0; i < 200; ++i) {
    auto held = std::make_shared<int>(i);
    const std::weak_ptr<int> watch = held;
    device.enqueue(stream, "hold", [held = std::move(held)] { static_cast<void>(held); });
    device.synchronize(stream);
    ASSERT_TRUE(watch.expired());
  }
}

// -- errors -------------------------------------------------------------------------------------------

TEST(HostStreamErrors, AFailedTaskFailsItsStreamForGood) {
  HostDevice device(small());
  Stream stream = device.make_stream("a");
  bool ran = false;
  device.enqueue(stream, "bad", [] { throw DeviceError("bit flipped"); });
  device.enqueue(stream, "later", [&] { ran = true; });
  EXPECT_THAT([&] { device.synchronize(stream); }, ThrowsMessage<DeviceError>(HasSubstr("bit flipped")));
  EXPECT_THROW(device.synchronize(stream), DeviceError);
  device.enqueue(stream, "much later", [&] { ran = true; });
  EXPECT_THROW(device.synchronize(stream), DeviceError);
  EXPECT_FALSE(ran);
}

TEST(HostStreamErrors, TravelThroughEventsFromStreamToStream) {
  HostDevice device(small());
  Stream a = device.make_stream("a");
  Stream b = device.make_stream("b");
  Stream c = device.make_stream("c");
  Event of_a = device.make_event();
  Event of_b = device.make_event();
  bool ran = false;
  device.enqueue(a, "bad", [] { throw DeviceError("lost"); });
  device.record(of_a, a);
  device.wait(b, of_a);
  device.record(of_b, b);
  device.wait(c, of_b);
  device.enqueue(c, "later", [&] { ran = true; });
  EXPECT_THROW(device.synchronize(c), DeviceError);
  EXPECT_THROW(device.wait_for(of_b, 10s), DeviceError);
  EXPECT_FALSE(ran);
}

TEST(HostStreamErrors, TravelFromDeviceToDevice) {
  HostDevice device(small());
  HostDevice peer(small());
  Stream bad = peer.make_stream("bad");
  Stream waits = device.make_stream("waits");
  Event before = peer.make_event();
  Event after = peer.make_event();
  bool ran = false;
  peer.record(before, bad);
  peer.enqueue(bad, "bad", [] { throw DeviceError("lost"); });
  peer.record(after, bad);
  device.wait_for_peer(waits, peer, before);
  device.synchronize(waits);
  device.wait_for_peer(waits, peer, after);
  device.enqueue(waits, "later", [&] { ran = true; });
  EXPECT_THAT([&] { device.synchronize(waits); }, ThrowsMessage<DeviceError>(HasSubstr("lost")));
  EXPECT_FALSE(ran);
}

TEST(HostStreamErrors, MemoryOfThePeerFreedBeforeTheCopyIsOne) {
  HostDevice device(small());
  HostDevice peer(small());
  MemoryBlock from = peer.allocate(64, "from");
  const MemoryBlock to = device.allocate(64, "to");
  Gate gate;
  Stream stream = device.make_stream("a");
  device.enqueue(stream, "gate", gate.task());
  device.copy_from(peer, to.data(), from.data(), 64, stream);
  from = MemoryBlock();
  gate.open();
  EXPECT_THAT([&] { device.synchronize(stream); },
              ThrowsMessage<MisuseError>(HasSubstr("copy from a peer reads the freed buffer 'from'")));
}

TEST(HostStreamErrors, DoNotReachEventsRecordedBefore) {
  HostDevice device(small());
  Stream a = device.make_stream("a");
  Stream b = device.make_stream("b");
  Event before = device.make_event();
  bool ran = false;
  device.record(before, a);
  device.enqueue(a, "bad", [] { throw DeviceError("lost"); });
  device.wait(b, before);
  device.enqueue(b, "unharmed", [&] { ran = true; });
  EXPECT_TRUE(device.wait_for(before, 10s));
  EXPECT_NO_THROW(device.synchronize(b));
  EXPECT_TRUE(ran);
  EXPECT_THROW(device.synchronize(a), DeviceError);
}

TEST(HostStreamErrors, AnythingThrownIsCarried) {
  HostDevice device(small());
  Stream stream = device.make_stream("a");
  device.enqueue(stream, "bad", [] { throw 42; });  // NOLINT: not an exception class, on purpose
  EXPECT_THROW(device.synchronize(stream), int);
}

TEST(HostStreamErrors, InjectedFaultsNameStreamAndTask) {
  HostDeviceOptions options = small();
  options.faults = std::make_shared<HostFaults>();
  std::mutex mutex;
  std::vector<std::string> seen;
  options.faults->before_task = [&](std::string_view stream, std::string_view task) {
    const std::lock_guard lock(mutex);
    seen.push_back(std::string(stream) + "/" + std::string(task));
    if (task == "fill") throw DeviceError("injected");
  };
  HostDevice device(options);
  const MemoryBlock block = device.allocate(8, "block");
  std::array<std::byte, 8> host{};
  Stream stream = device.make_stream("s");
  Event event = device.make_event();
  device.record(event, stream);
  device.wait(stream, event);
  device.copy(block.data(), host.data(), 8, CopyKind::host_to_device, stream);
  device.copy(host.data(), block.data(), 8, CopyKind::device_to_host, stream);
  device.fill_zero(block.data(), 8, stream);
  device.enqueue(stream, "dropped", [] {});
  EXPECT_THROW(device.synchronize(stream), DeviceError);
  EXPECT_THAT(seen, ElementsAre("s/record", "s/wait", "s/copy to device", "s/copy to host", "s/fill"));
}

// -- calls back -----------------------------------------------------------------------------------------

TEST(HostStreamCalls, ComeOnceAfterTheWorkBeforeThem) {
  HostDevice device(small());
  std::vector<std::string> seen;
  {
    Stream stream = device.make_stream("a");
    device.enqueue(stream, "work", [&] { seen.push_back("work"); });
    device.call_after(stream, [&](std::exception_ptr error) { seen.push_back(error ? "error" : "done"); });
    device.enqueue(stream, "bad", [] { throw DeviceError("lost"); });
    device.call_after(stream, [&](std::exception_ptr error) { seen.push_back(error ? "error" : "done"); });
    EXPECT_THROW(device.synchronize(stream), DeviceError);
    device.call_after(stream, [&](std::exception_ptr error) {
      try {
        std::rethrow_exception(error);
      } catch (const DeviceError& e) {
        seen.push_back(e.what());
      }
    });
    EXPECT_THROW(device.call_after(stream, nullptr), MisuseError);
  }
  EXPECT_THAT(seen, ElementsAre("work", "done", "error", "lost"));
}

TEST(HostStreamCalls, AFaultInjectedBeforeTheCallIsWhatItGets) {
  HostDeviceOptions options = small();
  options.faults = std::make_shared<HostFaults>();
  options.faults->before_task = [](std::string_view, std::string_view task) {
    if (task == "call") throw DeviceError("injected");
  };
  HostDevice device(options);
  bool failed = false;
  {
    Stream stream = device.make_stream("a");
    device.call_after(stream, [&](std::exception_ptr error) { failed = error != nullptr; });
  }
  EXPECT_TRUE(failed);
}

TEST(HostStream, MarksAndCallsOfAnIdleOnePassAtOnce) {
  HostDevice device(small());
  Stream stream = device.make_stream("a");
  Event event = device.make_event();
  device.record(event, stream);
  EXPECT_TRUE(device.wait_for(event, 0ms));
  bool called = false;
  device.wait(stream, event);
  device.call_after(stream, [&](std::exception_ptr error) { called = !error; });
  EXPECT_TRUE(called);
}

TEST(HostStream, MarksAndCallsOfABusyOneWaitForItsWork) {
  HostDevice device(small());
  Stream busy = device.make_stream("busy");
  Stream idle = device.make_stream("idle");
  Event behind = device.make_event(), after = device.make_event();
  std::promise<void> go;
  std::atomic<bool> worked{false}, called_late{false};
  device.enqueue(busy, "work", [&, open = go.get_future().share()] {
    open.wait();
    worked = true;
  });
  device.record(behind, busy);
  device.call_after(busy, [&](std::exception_ptr) { called_late = worked.load(); });
  device.wait(idle, behind);  // the mark has not passed: `idle` is not idle any more
  device.record(after, idle);
  EXPECT_FALSE(device.wait_for(behind, 0ms));
  EXPECT_FALSE(device.wait_for(after, 0ms));
  EXPECT_FALSE(called_late);
  go.set_value();
  device.synchronize(idle);
  device.synchronize(busy);
  EXPECT_TRUE(called_late);
  EXPECT_TRUE(device.wait_for(after, 0ms));
}

TEST(HostStream, AnIdleOneThatHasFailedPassesItsErrorOn) {
  HostDevice device(small());
  Stream failed = device.make_stream("failed");
  Stream other = device.make_stream("other");
  Event event = device.make_event();
  device.enqueue(failed, "bad", [] { throw DeviceError("lost"); });
  EXPECT_THROW(device.synchronize(failed), DeviceError);
  device.record(event, failed);
  EXPECT_THROW(device.wait_for(event, 60s), DeviceError);
  device.wait(other, event);  // it has passed, but not well
  EXPECT_THROW(device.synchronize(other), DeviceError);
}

// -- ending -------------------------------------------------------------------------------------------

TEST(HostStream, DestroyingItRunsWhatIsQueued) {
  HostDevice device(small());
  int ran = 0;
  {
    Stream stream = device.make_stream("a");
    for (int i = 0; i < 100; ++i) device.enqueue(stream, "count", [&] { ++ran; });
  }
  EXPECT_EQ(ran, 100);
}

TEST(HostStream, DestroyingAFailedOneIsQuiet) {
  HostDevice device(small());
  Stream stream = device.make_stream("a");
  device.enqueue(stream, "bad", [] { throw DeviceError("nobody asks"); });
  stream = Stream();
}

TEST(HostStream, DestroyingOneThatWaitsForAnUnrecordedEventDoesNotHang) {
  HostDevice device(small());
  Stream stream = device.make_stream("a");
  {
    Event event = device.make_event();
    device.wait(stream, event);
  }
  stream = Stream();
}

TEST(HostStream, ItsRecordsPassWhenItIsDestroyedOrFailed) {
  HostDevice device(small());
  Stream waiter = device.make_stream("waiter");
  Event event = device.make_event();
  {
    Stream recorder = device.make_stream("recorder");
    device.enqueue(recorder, "sleep", [] { std::this_thread::sleep_for(2ms); });
    device.record(event, recorder);
    device.wait(waiter, event);
  }
  EXPECT_NO_THROW(device.synchronize(waiter));
  {
    Stream recorder = device.make_stream("recorder");
    device.enqueue(recorder, "bad", [] { throw DeviceError("lost"); });
    device.record(event, recorder);
    device.wait(waiter, event);
  }
  EXPECT_THROW(device.synchronize(waiter), DeviceError);
}

// -- races --------------------------------------------------------------------------------------------

/// A pipeline as an offloading trainer runs it: each item goes up, is worked on, and comes back through
/// two buffers; only events order the streams. Delays differ by seed; the result must not.
std::vector<int> pipeline(HostDevice& device, int items) {
  constexpr std::size_t count = 33;
  constexpr std::size_t bytes = count * sizeof(int);
  const MemoryBlock buffers[2] = {device.allocate(bytes, "buffer 0"), device.allocate(bytes, "buffer 1")};
  std::vector<int> host(count * static_cast<std::size_t>(items));
  std::iota(host.begin(), host.end(), 0);
  Event up_done[2] = {device.make_event(), device.make_event()};
  Event worked[2] = {device.make_event(), device.make_event()};
  Event down_done[2] = {device.make_event(), device.make_event()};
  Stream up = device.make_stream("up");
  Stream compute = device.make_stream("compute");
  Stream down = device.make_stream("down");
  for (int round = 0; round < 2; ++round) {
    for (int i = 0; i < items; ++i) {
      const int slot = i % 2;
      int* buffer = static_cast<int*>(buffers[slot].data());
      int* mine = host.data() + static_cast<std::size_t>(i) * count;
      device.wait(up, down_done[slot]);
      if (round > 0 && i < 2) device.wait(up, down_done[1 - slot]);
      device.copy(buffer, mine, bytes, CopyKind::host_to_device, up);
      device.record(up_done[slot], up);
      device.wait(compute, up_done[slot]);
      device.enqueue(compute, "work", [buffer] {
        for (std::size_t k = 0; k < count; ++k) buffer[k] = buffer[k] * 3 + 1;
      });
      device.record(worked[slot], compute);
      device.wait(down, worked[slot]);
      device.copy(mine, buffer, bytes, CopyKind::device_to_host, down);
      device.record(down_done[slot], down);
    }
  }
  device.synchronize(down);
  return host;
}

TEST(HostDeviceRaces, DelaysNeverChangeTheResult) {
  constexpr int items = 6;
  std::vector<int> expected(33 * items);
  std::iota(expected.begin(), expected.end(), 0);
  for (int& x : expected) x = (x * 3 + 1) * 3 + 1;
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    HostDeviceOptions options = small(1_MiB);
    options.poison_memory = true;
    options.faults = std::make_shared<HostFaults>();
    std::atomic<std::uint64_t> calls{0};
    options.faults->before_task = [&](std::string_view, std::string_view) {
      std::uint64_t mixed = (seed * 1000003 + ++calls) * 0x9E3779B97F4A7C15ULL;
      mixed ^= mixed >> 29;
      if (mixed % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(mixed / 4 % 150));
    };
    HostDevice device(options);
    ASSERT_EQ(pipeline(device, items), expected) << "seed " << seed;
  }
}

TEST(HostDeviceRaces, AFaultAtAnyTaskReachesTheEndOfThePipeline) {
  // 6 items, two rounds: every one of the first 60 tasks fails once.
  for (int victim = 1; victim <= 60; ++victim) {
    HostDeviceOptions options = small(1_MiB);
    options.faults = std::make_shared<HostFaults>();
    std::atomic<int> calls{0};
    options.faults->before_task = [&](std::string_view, std::string_view) {
      if (++calls == victim) throw DeviceError("injected");
    };
    HostDevice device(options);
    EXPECT_THROW(pipeline(device, 6), DeviceError) << "task " << victim;
  }
}

TEST(HostDeviceRaces, ManyThreadsMayUseOneStreamAndOneEvent) {
  HostDevice device(small());
  Stream stream = device.make_stream("a");
  Stream other = device.make_stream("b");
  Event event = device.make_event();
  int unguarded = 0;  // only the stream's order protects it
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 250; ++i) {
        device.enqueue(stream, "count", [&] { ++unguarded; });
        device.record(event, stream);
        device.wait(i % 2 == 0 ? other : stream, event);
        if (i % 50 == 0) device.synchronize(stream);
        if (i % 60 == 0) {
          EXPECT_TRUE(device.wait_for(event, 60s));
        }
      }
    });
  }
  for (std::thread& t : threads) t.join();
  device.synchronize(stream);
  device.synchronize(other);
  EXPECT_EQ(unguarded, 1000);
}

}  // namespace
}  // namespace tandem
