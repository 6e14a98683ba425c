// Options, memory and copies of the host device.
#include "cpu_ops/device/host_device.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <limits>
#include <vector>

#include "core/base/error.hpp"
#include "core/ops/ops.hpp"
#include "core/ops/update_kernels.hpp"
#include "tests/cpu_ops/host_device_testing.hpp"

namespace tandem {
namespace {

using namespace literals;
using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using ::testing::ThrowsMessage;

// -- what it says of itself ---------------------------------------------------------------------------

TEST(HostDevice, DescribesItself) {
  HostDevice device({.capacity = 3_MiB, .threads = 2, .update_threads = 1});
  EXPECT_EQ(device.info().kind, "host");
  EXPECT_EQ(device.info().name, "host");
  EXPECT_EQ(device.info().capacity, 3_MiB);
  EXPECT_EQ(device.info().threads, 2);
  EXPECT_EQ(device.host_kernels().threads(), 1);
  EXPECT_THAT(device.info().compute_key,
              AllOf(StartsWith("host cpu="), HasSubstr(" isa="), HasSubstr(" threads=2 oneDNN=")));
}

TEST(HostDevice, TheComputeKeyDependsOnDeviceThreadsAlone) {
  HostDevice a({.capacity = 1_MiB, .threads = 2, .update_threads = 1});
  HostDevice b({.capacity = 2_MiB, .threads = 2, .update_threads = 2, .link_bytes_per_second = 1e9});
  HostDevice c({.capacity = 1_MiB, .threads = 1, .update_threads = 1});
  EXPECT_EQ(a.info().compute_key, b.info().compute_key);
  EXPECT_NE(a.info().compute_key, c.info().compute_key);
}

TEST(HostDevice, ChoosesCapacityAndThreadsWhereNoneAreGiven) {
  HostDevice device({});
  EXPECT_GT(device.info().capacity, 0U);
  EXPECT_GE(device.info().threads, 1);
}

TEST(HostDevice, RefusesBadOptions) {
  EXPECT_THROW(HostDevice({.capacity = 1, .threads = -1}), UsageError);
  EXPECT_THROW(HostDevice({.capacity = 1, .update_threads = -1}), UsageError);
  EXPECT_THROW(HostDevice({.capacity = 1, .link_bytes_per_second = -1}), UsageError);
  EXPECT_THROW(HostDevice({.capacity = 1, .link_bytes_per_second = std::numeric_limits<double>::infinity()}),
               UsageError);
}

// -- memory -------------------------------------------------------------------------------------------

TEST(HostDeviceMemory, IsAlignedAtEverySize) {
  HostDevice device(small(16_MiB));
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{4097}, 2_MiB - 1, 2_MiB, 2_MiB + 1}) {
    const MemoryBlock block = device.allocate(bytes, "block");
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(block.data()) % (bytes >= 2_MiB ? 2_MiB : arena_alignment), 0U) << bytes;
    EXPECT_EQ(block.bytes(), bytes);
    std::memset(block.data(), 1, bytes);
  }
  EXPECT_EQ(device.allocated_bytes(), 0U);
}

TEST(HostDeviceMemory, PoisonShowsWhoReadsTheUnwritten) {
  HostDeviceOptions options = small();
  options.poison_memory = true;
  HostDevice device(options);
  const MemoryBlock block = device.allocate(40, "block");
  float value = 0;
  std::memcpy(&value, static_cast<std::byte*>(block.data()) + 36, sizeof value);
  EXPECT_NE(value, value) << "a NaN";
}

TEST(HostDeviceMemory, BlocksMayOutliveTheDevice) {
  MemoryBlock block;
  MemoryBlock pinned;
  {
    HostDevice device(small());
    block = device.allocate(100, "block");
    pinned = device.allocate_pinned(100, "pinned");
  }
  static_cast<std::byte*>(block.data())[99] = std::byte{1};
}

TEST(HostDeviceMemory, PinnedBlocksHaveTheSizeAskedForAndDoNotCountOnTheDevice) {
  HostDevice device(small(1));
  {
    const MemoryBlock a = device.allocate_pinned(3_MiB + 5, "state");
    EXPECT_EQ(a.bytes(), 3_MiB + 5);
    EXPECT_EQ(device.pinned_bytes(), 3_MiB + 5);
    EXPECT_EQ(device.allocated_bytes(), 0U);
    EXPECT_FALSE(device.allocate_pinned(0, "none"));
  }
  EXPECT_EQ(device.pinned_bytes(), 0U);
  EXPECT_THROW(device.allocate_pinned(std::size_t{1} << 60, "everything"), DeviceError);
  EXPECT_THROW(device.allocate_pinned(std::numeric_limits<std::size_t>::max(), "wraps around"), DeviceError);
  EXPECT_EQ(device.pinned_bytes(), 0U);
}

// -- copies -------------------------------------------------------------------------------------------

TEST(HostDeviceCopies, OfAFreedBufferThrowWithItsName) {
  HostDevice device(small());
  Stream stream = device.make_stream("copy");
  std::array<std::byte, 16> host{};
  void* gone = nullptr;
  {
    const MemoryBlock block = device.allocate(16, "activations 3");
    gone = block.data();
  }
  EXPECT_THAT([&] { device.copy(host.data(), gone, 16, CopyKind::device_to_host, stream); },
              ThrowsMessage<MisuseError>(HasSubstr("reads the freed buffer 'activations 3'")));
}

TEST(HostDeviceCopies, OfABufferFreedWhileQueuedFailTheStream) {
  HostDevice device(small());
  Stream stream = device.make_stream("copy");
  std::array<std::byte, 16> host{};
  Gate gate;
  {
    const MemoryBlock block = device.allocate(16, "activations 3");
    device.enqueue(stream, "gate", gate.task());
    device.copy(host.data(), block.data(), 16, CopyKind::device_to_host, stream);
  }
  gate.open();
  EXPECT_THAT([&] { device.synchronize(stream); },
              ThrowsMessage<MisuseError>(HasSubstr("freed buffer 'activations 3'")));
}

// -- emulated link ------------------------------------------------------------------------------------

TEST(EmulatedLink, IsThatOfCopiesFromPeersToo) {
  HostDeviceOptions options = small();
  const auto device_with = [&](double link) {
    options.link_bytes_per_second = link;
    return std::make_unique<HostDevice>(options);
  };
  constexpr std::size_t bytes = 1000000;  // 50 ms at 20 MB/s
  const auto timed = [&](double link_of_peer, double own_link, std::size_t down, std::size_t within) {
    const auto peer = device_with(link_of_peer), device = device_with(own_link);
    const MemoryBlock theirs = peer->allocate(bytes, "theirs"), ours = device->allocate(2 * bytes, "ours");
    std::vector<std::byte> host(bytes);
    const Stream copies = device->make_stream("copies"), loads = device->make_stream("loads");
    const auto begin = std::chrono::steady_clock::now();
    device->copy_from(*peer, ours.data(), theirs.data(), bytes, copies);
    device->copy(static_cast<std::byte*>(ours.data()) + bytes, host.data(), down, CopyKind::host_to_device, loads);
    device->copy_from(*device, static_cast<std::byte*>(ours.data()) + bytes, ours.data(), within, copies);
    device->synchronize(copies);
    device->synchronize(loads);
    return std::chrono::steady_clock::now() - begin;
  };
  EXPECT_GE(timed(20e6, 0, 0, 0), 49ms) << "up the peer's link";
  EXPECT_GE(timed(0, 20e6, 0, 0), 49ms) << "down its own";
  EXPECT_GE(timed(0, 20e6, bytes, 0), 99ms) << "which others share";
  // A busy machine can only delay: the best of a few tries shows what does not wait.
  auto both = 1s * 100.0, inside = both;
  for (int i = 0; i < 5; ++i) {
    both = std::min<decltype(both)>(both, timed(20e6, 20e6, 0, 0));
    inside = std::min<decltype(inside)>(inside, timed(0, 20e6, 0, bytes));
  }
  EXPECT_LT(both, 90ms) << "both links at once";
  EXPECT_LT(inside, 90ms) << "within a device";
}

TEST(EmulatedLink, IsSharedByStreamsAndIndependentPerDirection) {
  HostDeviceOptions options = small();
  options.link_bytes_per_second = 20e6;
  HostDevice device(options);
  constexpr std::size_t bytes = 1000000;  // 50 ms
  const MemoryBlock a = device.allocate(bytes, "a");
  const MemoryBlock b = device.allocate(bytes, "b");
  std::vector<std::byte> host_a(bytes);
  std::vector<std::byte> host_b(bytes);
  Stream first = device.make_stream("first");
  Stream second = device.make_stream("second");
  const auto timed = [&](CopyKind kind_of_second) {
    const auto begin = std::chrono::steady_clock::now();
    device.copy(a.data(), host_a.data(), bytes, CopyKind::host_to_device, first);
    if (kind_of_second == CopyKind::host_to_device) {
      device.copy(b.data(), host_b.data(), bytes, kind_of_second, second);
    } else {
      device.copy(host_b.data(), b.data(), bytes, kind_of_second, second);
    }
    device.synchronize(first);
    device.synchronize(second);
    return std::chrono::steady_clock::now() - begin;
  };
  EXPECT_GE(timed(CopyKind::host_to_device), 99ms) << "one link, one copy at a time";
  // A busy machine can only delay, so the best of a few tries shows that both directions run at once.
  auto best = timed(CopyKind::device_to_host);
  for (int i = 0; i < 5 && best > 90ms; ++i) best = std::min(best, timed(CopyKind::device_to_host));
  EXPECT_GE(best, 49ms);
  EXPECT_LT(best, 95ms);
}

}  // namespace
}  // namespace tandem
