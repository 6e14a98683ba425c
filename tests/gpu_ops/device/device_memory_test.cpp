// Memory of a CUDA device.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <vector>

#include "core/base/error.hpp"
#include "tests/gpu_ops/device/device_testing.hpp"

namespace tandem {
namespace {

using namespace literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::pattern;
using ::testing::StartsWith;

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

}  // namespace
}  // namespace tandem
