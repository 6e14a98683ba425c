// Streams and events of a CUDA device.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "core/base/error.hpp"
#include "gpu_ops/device/native_stream.hpp"
#include "tests/gpu_ops/device/device_testing.hpp"

namespace tandem {
namespace {

using namespace literals;
using namespace std::chrono_literals;
using ::testing::HasSubstr;
using testing::pattern;
using ::testing::ThrowsMessage;

/// Work that keeps a stream busy for a while.
class Busy {
 public:
  explicit Busy(CudaDevice& device) : device_(device), block_(device.allocate(8_MiB, "busy")) {}
  void queue(StreamView stream) {
    for (int i = 0; i < 16; ++i) device_.fill_zero(block_.data(), block_.bytes(), stream);
  }

 private:
  CudaDevice& device_;
  MemoryBlock block_;
};

TEST(CudaStream, AnEventOrdersWorkAcrossStreams) {
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    testing::delay_streams(seed, 150);
    TANDEM_OPEN_OR_SKIP(device);
    Busy busy(device);
    constexpr std::size_t bytes = 100003;
    const std::vector<std::byte> values = pattern(bytes, seed);
    const MemoryBlock from = device.allocate_pinned(bytes, "from");
    const MemoryBlock to = device.allocate_pinned(bytes, "to");
    const MemoryBlock a = device.allocate(bytes, "a");
    const MemoryBlock b = device.allocate(bytes, "b");
    std::memcpy(from.data(), values.data(), bytes);
    Stream up = device.make_stream("up");
    Stream work = device.make_stream("work");
    Stream down = device.make_stream("down");
    Event arrived = device.make_event();
    Event worked = device.make_event();
    busy.queue(up);
    device.copy(a.data(), from.data(), bytes, CopyKind::host_to_device, up);
    device.record(arrived, up);
    device.wait(work, arrived);
    device.copy(b.data(), a.data(), bytes, CopyKind::device_to_device, work);
    device.record(worked, work);
    device.wait(down, worked);
    device.copy(to.data(), b.data(), bytes, CopyKind::device_to_host, down);
    device.synchronize(down);
    ASSERT_EQ(std::memcmp(to.data(), values.data(), bytes), 0) << "seed " << seed;
  }
  testing::delay_streams(0, 0);
}

TEST(CudaStream, AnEventMayGoWhileOthersWaitForIt) {
  TANDEM_OPEN_OR_SKIP(device);
  Busy busy(device);
  Stream a = device.make_stream("a");
  Stream b = device.make_stream("b");
  {
    Event event = device.make_event();
    busy.queue(a);
    device.record(event, a);
    device.wait(b, event);
  }
  device.synchronize(b);
}

TEST(CudaStream, AWaitThatEndsSaysWhetherTheEventPassed) {
  TANDEM_OPEN_OR_SKIP(device);
  Busy busy(device);
  Stream stream = device.make_stream("a");
  Event event = device.make_event();
  busy.queue(stream);
  device.record(event, stream);
  device.wait_for(event, 0ms);  // either way: it does not hang
  EXPECT_TRUE(device.wait_for(event, 60s));
  EXPECT_TRUE(device.wait_for(event, 0ms));
}

TEST(CudaStream, CallsComeOnceInOrderAfterTheWorkBeforeThem) {
  testing::delay_streams(3, 300);
  TANDEM_OPEN_OR_SKIP(device);
  constexpr std::size_t bytes = 4096;
  const MemoryBlock block = device.allocate(bytes, "block");
  const MemoryBlock up = device.allocate_pinned(20 * bytes, "up");
  const MemoryBlock down = device.allocate_pinned(20 * bytes, "down");
  std::memset(down.data(), 0, down.bytes());
  std::mutex mutex;
  std::vector<int> seen;
  {
    Stream stream = device.make_stream("a");
    for (int i = 0; i < 20; ++i) {
      auto* const source = static_cast<std::byte*>(up.data()) + static_cast<std::size_t>(i) * bytes;
      auto* const target = static_cast<std::byte*>(down.data()) + static_cast<std::size_t>(i) * bytes;
      std::memset(source, i + 1, bytes);
      device.copy(block.data(), source, bytes, CopyKind::host_to_device, stream);
      device.copy(target, block.data(), bytes, CopyKind::device_to_host, stream);
      device.call_after(stream, [&, i, target](std::exception_ptr error) {
        const std::lock_guard lock(mutex);
        seen.push_back(!error && target[bytes - 1] == static_cast<std::byte>(i + 1) ? i : -1);
      });
    }
    EXPECT_THROW(device.call_after(stream, nullptr), MisuseError);
  }  // the stream's end is that of its calls
  ASSERT_EQ(seen.size(), 20U);
  for (int i = 0; i < 20; ++i) EXPECT_EQ(seen[static_cast<std::size_t>(i)], i);
  testing::delay_streams(0, 0);
}

TEST(CudaStream, DestroyingItRunsWhatIsQueued) {
  testing::delay_streams(5, 400);
  TANDEM_OPEN_OR_SKIP(device);
  const MemoryBlock block = device.allocate(1_MiB, "block");
  const MemoryBlock host = device.allocate_pinned(1_MiB, "host");
  std::memset(host.data(), 1, host.bytes());
  {
    Stream stream = device.make_stream("a");
    for (int i = 0; i < 10; ++i) device.fill_zero(block.data(), block.bytes(), stream);
    device.copy(host.data(), block.data(), host.bytes(), CopyKind::device_to_host, stream);
  }
  EXPECT_EQ(static_cast<std::byte*>(host.data())[1_MiB - 1], std::byte{0});
  testing::delay_streams(0, 0);
}

TEST(CudaStream, AWrappedStreamIsTheCallersOwn) {
  TANDEM_OPEN_OR_SKIP(device);
  const MemoryBlock block = device.allocate(64, "block");
  std::vector<std::byte> host(64, std::byte{1});
  Stream theirs = device.make_stream("theirs");
  EXPECT_NE(native_stream(theirs), nullptr);
  EXPECT_THROW((void)native_stream(StreamView()), MisuseError);
  {
    Stream wrapped = device.wrap_stream(native_stream(theirs));
    EXPECT_EQ(native_stream(wrapped), native_stream(theirs));
    device.fill_zero(block.data(), 64, wrapped);
  }
  device.copy(host.data(), block.data(), 64, CopyKind::device_to_host, theirs);
  device.synchronize(theirs);
  EXPECT_EQ(host, std::vector<std::byte>(64)) << "in the order of the one stream that both are";
}

/// The legacy default stream by its two handles, and the calling thread's own.
constexpr std::uintptr_t default_streams[] = {0, 1, 2};

TEST(CudaStream, AWrappedDefaultStreamIsOrderedByEvents) {
  for (const std::uintptr_t handle : default_streams) {
    for (std::uint64_t seed = 0; seed < 10; ++seed) {
      testing::delay_streams(seed, 150);
      TANDEM_OPEN_OR_SKIP(device);
      Busy busy(device);
      constexpr std::size_t bytes = 50001;
      const std::vector<std::byte> values = pattern(bytes, seed);
      const MemoryBlock from = device.allocate_pinned(bytes, "from");
      const MemoryBlock to = device.allocate_pinned(bytes, "to");
      const MemoryBlock a = device.allocate(bytes, "a");
      const MemoryBlock b = device.allocate(bytes, "b");
      std::memcpy(from.data(), values.data(), bytes);
      Stream up = device.make_stream("up");
      Stream work = device.wrap_stream(reinterpret_cast<void*>(handle));
      Stream down = device.make_stream("down");
      Event arrived = device.make_event();
      Event worked = device.make_event();
      busy.queue(up);
      device.copy(a.data(), from.data(), bytes, CopyKind::host_to_device, up);
      device.record(arrived, up);
      device.wait(work, arrived);
      busy.queue(work);
      device.copy(b.data(), a.data(), bytes, CopyKind::device_to_device, work);
      device.record(worked, work);
      device.wait(down, worked);
      device.copy(to.data(), b.data(), bytes, CopyKind::device_to_host, down);
      device.synchronize(down);
      ASSERT_EQ(std::memcmp(to.data(), values.data(), bytes), 0) << "handle " << handle << ", seed " << seed;
      bool called = false;
      device.call_after(work, [&](std::exception_ptr error) { called = !error; });
      work = {};  // its end is that of its calls
      EXPECT_TRUE(called);
    }
  }
  testing::delay_streams(0, 0);
}

TEST(CudaStream, AThreadsOwnStreamIsRefusedInAnother) {
  TANDEM_OPEN_OR_SKIP(device);
  const Stream own = device.wrap_stream(reinterpret_cast<void*>(2));
  const Stream legacy = device.wrap_stream(nullptr);
  const Event event = device.make_event();
  const auto refused = ThrowsMessage<MisuseError>(HasSubstr("used in another thread than the one that wrapped it"));
  std::thread([&] {
    EXPECT_THAT([&] { device.record(event, own); }, refused);
    EXPECT_THAT([&] { device.wait(own, event); }, refused);
    EXPECT_THAT([&] { device.synchronize(own); }, refused);
    EXPECT_THAT([&] { device.call_after(own, [](std::exception_ptr) {}); }, refused);
    EXPECT_THAT([&] { device.require_own(own); }, refused);
    EXPECT_THAT([&] { (void)native_stream(own); }, refused);
    EXPECT_NO_THROW(device.record(event, legacy));
  }).join();
  EXPECT_NO_THROW(device.record(event, own));
  EXPECT_NO_THROW(device.synchronize(own));
  Stream elsewhere = device.wrap_stream(reinterpret_cast<void*>(2));
  std::thread([gone = std::move(elsewhere)]() mutable { gone = {}; }).join();
}

TEST(CudaStream, RefusesAnEventOfAnotherDevice) {
  TANDEM_OPEN_OR_SKIP(device, 4_MiB);
  const auto other = testing::open_test_device(4_MiB);
  Stream stream = device.make_stream("a");
  Event event = other->make_event();
  EXPECT_THROW(device.wait(stream, event), MisuseError);
}

}  // namespace
}  // namespace tandem
