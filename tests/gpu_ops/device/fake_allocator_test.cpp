// Memory of a CUDA device from an allocator of the caller's.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <map>
#include <memory>
#include <vector>

#include "core/base/error.hpp"
#include "tests/gpu_ops/device/fake_device.hpp"

namespace tandem {
namespace {

using namespace literals;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using testing::open_fake_device;

/// Takes a whole card's memory at once, as pools do, and notes where it was called.
class CudaPool {
 public:
  explicit CudaPool(std::size_t bytes) { cudaMalloc(&memory_, bytes); }
  ~CudaPool() { cudaFree(memory_); }
  CudaPool(const CudaPool&) = delete;
  CudaPool& operator=(const CudaPool&) = delete;

  DeviceAllocator allocator() {
    return {.allocate =
                [this](std::size_t bytes, std::size_t alignment) {
                  contexts.push_back(fake_cuda::current_context());
                  void* const data = static_cast<std::byte*>(memory_) + used_;
                  used_ += align_up(bytes, alignment);
                  given[data] = bytes;
                  return data;
                },
            .free =
                [this](void* data, std::size_t bytes) {
                  contexts.push_back(fake_cuda::current_context());
                  EXPECT_EQ(given.at(data), bytes);
                  given.erase(data);
                }};
  }
  std::map<void*, std::size_t> given;
  std::vector<int> contexts;

 private:
  void* memory_ = nullptr;
  std::size_t used_ = 0;
};

class FakeAllocator : public ::testing::Test {
 protected:
  void TearDown() override { fake_cuda::install({}); }
};

TEST_F(FakeAllocator, GivesAllMemoryWithTheDeviceCurrent) {
  fake_cuda::install({.cards = {{}, {}}});
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  CudaPool pool(1_MiB);
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  {
    const auto device = open_fake_device({.capacity = 1_MiB, .ordinal = 1, .allocator = pool.allocator()});
    const int before = fake_cuda::census().allocations;
    const MemoryBlock block = device->allocate(4097, "block");
    EXPECT_EQ(fake_cuda::census().allocations, before) << "none of the device's own";
    EXPECT_EQ(pool.given.at(block.data()), 4097U);
    EXPECT_EQ(device->allocated_bytes(), 4097U);
    const Stream stream = device->make_stream("stream");
    std::vector<std::byte> host(4097, std::byte{1});
    device->fill_zero(block.data(), block.bytes(), stream);
    device->copy(host.data(), block.data(), block.bytes(), CopyKind::device_to_host, stream);
    device->synchronize(stream);
    EXPECT_EQ(host, std::vector<std::byte>(4097));
  }
  EXPECT_THAT(pool.given, IsEmpty());
  EXPECT_THAT(pool.contexts, ElementsAre(1, 1));
  EXPECT_EQ(fake_cuda::current_context(), 0);
}

// A pool that has taken the card before leaves nothing free, which is no reason to refuse a ceiling of the pool's size.
TEST_F(FakeAllocator, MayHaveTakenTheCardBefore) {
  fake_cuda::install({});
  (void)open_fake_device({.capacity = 600_MiB});  // the context is measured once, here while nothing else is in use
  CudaPool pool(700_MiB);
  EXPECT_THROW((void)open_fake_device({.capacity = 600_MiB}), PlanError);
  const auto device = open_fake_device({.capacity = 600_MiB, .allocator = pool.allocator()});
  EXPECT_EQ(device->allocate(500_MiB, "block").bytes(), 500_MiB);
}

}  // namespace
}  // namespace tandem
