// Memory of any device: counted to the byte, within its capacity, copied at odd sizes and offsets.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <thread>
#include <vector>

#include "core/base/error.hpp"
#include "tests/core/device/any_device.hpp"
#include "tests/core/pages.hpp"

namespace tandem {
namespace {

using namespace literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(AnyDeviceMemory, CountsToTheByte) {
  TANDEM_ANY_DEVICE_OR_SKIP(device, 1_MiB);
  MemoryBlock a = device.allocate(1_MiB - 1, "a");
  EXPECT_THROW(device.allocate(2, "b"), PlanError);
  const MemoryBlock b = device.allocate(1, "b");
  EXPECT_EQ(device.allocated_bytes(), 1_MiB);
  a = MemoryBlock();
  EXPECT_EQ(device.allocated_bytes(), 1U);
  EXPECT_EQ(device.peak_bytes(), 1_MiB);
  EXPECT_FALSE(device.allocate(0, "nothing"));
  EXPECT_NO_THROW(device.allocate(1_MiB - 1, "again"));
}

/// Whoever writes first would wait for the pages, and registering makes them one after the other.
TEST(AnyDeviceMemory, PinnedPagesAreThereAndZero) {
  TANDEM_ANY_DEVICE_OR_SKIP(device);
  const MemoryBlock block = device.allocate_pinned(5_MiB + 5, "state");
  EXPECT_EQ(testing::pages_missing(block.data(), block.bytes()), 0);
  const auto* const bytes = static_cast<const unsigned char*>(block.data());
  EXPECT_TRUE(std::all_of(bytes, bytes + block.bytes(), [](unsigned char b) { return b == 0; }));
}

TEST(AnyDeviceMemory, OverCapacityNamesWhatIsHeld) {
  TANDEM_ANY_DEVICE_OR_SKIP(device, 1_MiB);
  const MemoryBlock a = device.allocate(512_KiB, "weights");
  const MemoryBlock b = device.allocate(256_KiB, "gradients");
  try {
    device.allocate(256_KiB + 1, "workspace");
    FAIL() << "allocated beyond the capacity";
  } catch (const PlanError& e) {
    EXPECT_THAT(e.what(), AllOf(HasSubstr("'workspace'"), HasSubstr("'weights' 512.0 KiB"), HasSubstr("'gradients'"),
                                HasSubstr("262144 of 1048576 bytes are free")));
    EXPECT_THAT(e.table(), HasSubstr("'weights' 512.0 KiB, 'gradients' 256.0 KiB"));
    EXPECT_EQ(e.exit_code(), ExitCode::does_not_fit);
  }
  EXPECT_EQ(device.peak_bytes(), 768_KiB) << "a refusal is no use";
  EXPECT_THROW(device.allocate(std::numeric_limits<std::size_t>::max(), "all"), PlanError);
}

TEST(AnyDeviceMemory, ThreadsMayAllocateAtOnceWithoutPassingTheCeiling) {
  TANDEM_ANY_DEVICE_OR_SKIP(device, 64_KiB);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 200; ++i) {
        try {
          const MemoryBlock a = device.allocate(24_KiB, "a");
          std::this_thread::yield();
        } catch (const PlanError&) {
          continue;  // two fit, four may ask
        }
      }
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(device.allocated_bytes(), 0U);
  EXPECT_LE(device.peak_bytes(), 64_KiB);
  EXPECT_GE(device.peak_bytes(), 24_KiB);
}

TEST(AnyDeviceCopies, GoBothWaysAtOddSizesAndOffsets) {
  TANDEM_ANY_DEVICE_OR_SKIP(device);
  Stream stream = device.make_stream("copy");
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{22}, std::size_t{55}, std::size_t{100003}}) {
    const MemoryBlock a = device.allocate(bytes + 3, "a");
    const MemoryBlock b = device.allocate(bytes + 1, "b");
    std::byte* a_part = static_cast<std::byte*>(a.data()) + 3;
    std::byte* b_part = static_cast<std::byte*>(b.data()) + 1;
    std::vector<std::byte> from(bytes);
    for (std::size_t i = 0; i < bytes; ++i) from[i] = static_cast<std::byte>(i * 7 + i / 251 + bytes);
    std::vector<std::byte> to(bytes);
    device.copy(a_part, from.data(), bytes, CopyKind::host_to_device, stream);
    device.copy(b_part, a_part, bytes, CopyKind::device_to_device, stream);
    device.fill_zero(a.data(), bytes + 3, stream);
    device.copy(to.data(), b_part, bytes, CopyKind::device_to_host, stream);
    device.synchronize(stream);
    EXPECT_EQ(from, to);
    device.copy(to.data(), a_part, bytes, CopyKind::device_to_host, stream);
    device.synchronize(stream);
    EXPECT_EQ(to, std::vector<std::byte>(bytes));
  }
}

TEST(AnyDeviceCopies, OutsideOfAnAllocationThrowWithItsName) {
  TANDEM_ANY_DEVICE_OR_SKIP(device);
  Stream stream = device.make_stream("copy");
  const MemoryBlock block = device.allocate(100, "weights");
  std::byte* data = static_cast<std::byte*>(block.data());
  std::vector<std::byte> host(200);
  const auto copy = [&](void* to, const void* from, std::size_t bytes, CopyKind kind) {
    return [=, &device, &stream] { device.copy(to, from, bytes, kind, stream); };
  };
  EXPECT_NO_THROW(device.copy(data + 50, host.data(), 50, CopyKind::host_to_device, stream));
  EXPECT_NO_THROW(device.copy(data + 100, host.data(), 0, CopyKind::host_to_device, stream)) << "nothing is moved";
  EXPECT_THAT(copy(data + 50, host.data(), 51, CopyKind::host_to_device),
              ThrowsMessage<MisuseError>(
                  AllOf(HasSubstr("writes beyond the end of 'weights'"), HasSubstr("offset 50 of 100"))));
  EXPECT_THAT(copy(host.data(), data, 101, CopyKind::device_to_host),
              ThrowsMessage<MisuseError>(HasSubstr("reads beyond the end of 'weights'")));
  EXPECT_THAT(copy(host.data() + 100, host.data(), 10, CopyKind::host_to_device),
              ThrowsMessage<MisuseError>(HasSubstr("writes no allocation of the device")));
  EXPECT_THAT(copy(host.data(), data, 10, CopyKind::host_to_device), ThrowsMessage<MisuseError>(HasSubstr("'weights'")))
      << "the wrong direction";
  EXPECT_THAT(copy(data, host.data(), 10, CopyKind::device_to_host), ThrowsMessage<MisuseError>(HasSubstr("reads no")));
  EXPECT_THAT(copy(data, data + 50, 10, CopyKind::host_to_device),
              ThrowsMessage<MisuseError>(HasSubstr("as if it were host")));
  EXPECT_THAT(copy(data, data + 9, 10, CopyKind::device_to_device),
              ThrowsMessage<MisuseError>(HasSubstr("what it writes")));
  EXPECT_THROW(device.copy(nullptr, host.data(), 1, CopyKind::host_to_device, stream), MisuseError);
  EXPECT_THROW(device.copy(data, nullptr, 1, CopyKind::host_to_device, stream), MisuseError);
  EXPECT_THROW(
      device.copy(data, host.data(), std::numeric_limits<std::size_t>::max(), CopyKind::host_to_device, stream),
      MisuseError);
  EXPECT_THROW(device.fill_zero(host.data(), 1, stream), MisuseError);
  EXPECT_THROW(device.fill_zero(data + 99, 2, stream), MisuseError);
  EXPECT_NO_THROW(device.synchronize(stream)) << "refused calls queue nothing";
}

}  // namespace
}  // namespace tandem
