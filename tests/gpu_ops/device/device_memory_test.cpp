#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

#include "core/error.hpp"
#include "tests/gpu_ops/device/device_testing.hpp"

namespace tandem {
namespace {

using namespace literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::pattern;
using ::testing::StartsWith;
using ::testing::ThrowsMessage;

TEST(CudaDevice, DescribesItself) {
  TANDEM_OPEN_OR_SKIP(device, 3_MiB);
  EXPECT_EQ(device.info().kind, "cuda");
  EXPECT_THAT(device.info().name, StartsWith("cuda:"));
  EXPECT_EQ(device.info().capacity, 3_MiB);
  EXPECT_GT(device.info().reserved, 0U) << "context and libraries are a line of their own";
  EXPECT_EQ(device.info().threads, 0);
  EXPECT_THAT(device.info().compute_key,
              AllOf(StartsWith("cuda gpu="), HasSubstr(" sm="), HasSubstr(" units="), HasSubstr(" cudart=")));
  EXPECT_EQ(device.host_kernels().threads(), 1);
}

TEST(CudaDeviceMemory, CountsToTheByte) {
  TANDEM_OPEN_OR_SKIP(device, 1_MiB);
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

TEST(CudaDeviceMemory, OverCapacityNamesWhatIsHeld) {
  TANDEM_OPEN_OR_SKIP(device, 1_MiB);
  const MemoryBlock a = device.allocate(512_KiB, "weights");
  const MemoryBlock b = device.allocate(256_KiB, "gradients");
  try {
    device.allocate(256_KiB + 1, "workspace");
    FAIL() << "allocated beyond the capacity";
  } catch (const PlanError& e) {
    EXPECT_THAT(e.what(), AllOf(HasSubstr("'workspace'"), HasSubstr("'weights' 512.0 KiB"), HasSubstr("'gradients'")));
    EXPECT_EQ(e.exit_code(), ExitCode::does_not_fit);
  }
  EXPECT_EQ(device.peak_bytes(), 768_KiB) << "a refusal is no use";
  EXPECT_THROW(device.allocate(std::numeric_limits<std::size_t>::max(), "all"), PlanError);
}

TEST(CudaDeviceMemory, BlocksMayOutliveTheDevice) {
  MemoryBlock block;
  MemoryBlock pinned;
  {
    TANDEM_OPEN_OR_SKIP(device);
    block = device.allocate(100, "block");
    pinned = device.allocate_pinned(100, "pinned");
  }
  static_cast<std::byte*>(pinned.data())[99] = std::byte{1};
}

TEST(CudaDeviceMemory, ThreadsMayAllocateAtOnceWithoutPassingTheCeiling) {
  TANDEM_OPEN_OR_SKIP(device, 64_KiB);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 50; ++i) {
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

TEST(CudaDevicePinned, HasTheSizeAskedForOnWholePages) {
  TANDEM_OPEN_OR_SKIP(device);
  {
    const MemoryBlock a = device.allocate_pinned(5_MiB + 5, "state");
    EXPECT_EQ(a.bytes(), 5_MiB + 5);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(a.data()) % 2_MiB, 0U) << "large pages are possible";
    EXPECT_EQ(device.pinned_bytes(), 5_MiB + 5);
    EXPECT_EQ(device.allocated_bytes(), 0U);
    std::memset(a.data(), 1, a.bytes());
    EXPECT_FALSE(device.allocate_pinned(0, "none"));
    const MemoryBlock small = device.allocate_pinned(1, "small");
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(small.data()) % 4_KiB, 0U);
  }
  EXPECT_EQ(device.pinned_bytes(), 0U);
  EXPECT_THROW(device.allocate_pinned(std::numeric_limits<std::size_t>::max(), "wraps around"), DeviceError);
  EXPECT_EQ(device.pinned_bytes(), 0U);
}

TEST(CudaDevicePinned, CopiesCrossRegisteredPieces) {
  TANDEM_OPEN_OR_SKIP(device);
  Stream stream = device.make_stream("copy");
  const std::size_t bytes = 7_MiB + 3;  // pieces of 2 MiB
  const MemoryBlock up = device.allocate_pinned(bytes, "up");
  const MemoryBlock down = device.allocate_pinned(bytes, "down");
  const MemoryBlock block = device.allocate(bytes, "block");
  const std::vector<std::byte> values = pattern(bytes, 3);
  std::memcpy(up.data(), values.data(), bytes);
  auto* const source = static_cast<std::byte*>(up.data());
  auto* const target = static_cast<std::byte*>(down.data());
  auto* const on_device = static_cast<std::byte*>(block.data());
  for (const std::size_t first : {std::size_t{0}, 2_MiB - 1, 4_MiB}) {
    std::memset(down.data(), 0, bytes);
    device.copy(on_device + first, source + first, bytes - first, CopyKind::host_to_device, stream);
    device.copy(target + first, on_device + first, bytes - first, CopyKind::device_to_host, stream);
    device.synchronize(stream);
    EXPECT_EQ(std::memcmp(target + first, source + first, bytes - first), 0) << first;
  }
}

TEST(CudaDeviceCopies, GoBothWaysAtOddSizesAndOffsets) {
  TANDEM_OPEN_OR_SKIP(device);
  Stream stream = device.make_stream("copy");
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{22}, std::size_t{55}, std::size_t{100003}}) {
    const MemoryBlock a = device.allocate(bytes + 3, "a");
    const MemoryBlock b = device.allocate(bytes + 1, "b");
    std::byte* a_part = static_cast<std::byte*>(a.data()) + 3;
    std::byte* b_part = static_cast<std::byte*>(b.data()) + 1;
    const std::vector<std::byte> from = pattern(bytes, bytes);
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

TEST(CudaDeviceCopies, OutsideOfAnAllocationThrowWithItsName) {
  TANDEM_OPEN_OR_SKIP(device);
  Stream stream = device.make_stream("copy");
  const MemoryBlock block = device.allocate(100, "weights");
  std::byte* data = static_cast<std::byte*>(block.data());
  std::vector<std::byte> host(200);
  const auto copy = [&](void* to, const void* from, std::size_t bytes, CopyKind kind) {
    return [=, &device, &stream] { device.copy(to, from, bytes, kind, stream); };
  };
  EXPECT_NO_THROW(device.copy(data + 100, host.data(), 0, CopyKind::host_to_device, stream)) << "nothing is moved";
  EXPECT_THAT(copy(data + 50, host.data(), 51, CopyKind::host_to_device),
              ThrowsMessage<MisuseError>(HasSubstr("writes beyond the end of 'weights'")));
  EXPECT_THAT(copy(host.data(), data, 101, CopyKind::device_to_host),
              ThrowsMessage<MisuseError>(HasSubstr("reads beyond the end of 'weights'")));
  EXPECT_THAT(copy(host.data(), data, 10, CopyKind::host_to_device), ThrowsMessage<MisuseError>(HasSubstr("'weights'")))
      << "the wrong direction";
  EXPECT_THAT(copy(data, host.data(), 10, CopyKind::device_to_host), ThrowsMessage<MisuseError>(HasSubstr("reads no")));
  EXPECT_THROW(device.copy(nullptr, host.data(), 1, CopyKind::host_to_device, stream), MisuseError);
  EXPECT_THROW(device.fill_zero(host.data(), 1, stream), MisuseError);
  EXPECT_THROW(device.fill_zero(data + 99, 2, stream), MisuseError);
  EXPECT_NO_THROW(device.synchronize(stream)) << "refused calls queue nothing";
}

}  // namespace
}  // namespace tandem
