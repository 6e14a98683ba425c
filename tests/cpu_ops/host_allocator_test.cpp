// Memory of the host device from an allocator of the caller's.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <map>
#include <memory>
#include <new>

#include "core/base/error.hpp"
#include "cpu_ops/device/host_device.hpp"

namespace tandem {
namespace {

using namespace literals;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::ThrowsMessage;

struct OutOfPool {};

/// A pool of a caller's, which knows what it has given.
struct HostPool {
  std::map<void*, std::size_t> given;
  std::size_t shift = 0;  ///< bytes that memory is off its alignment
  bool empty = false;
  bool throws = false;

  static DeviceAllocator allocator(const std::shared_ptr<HostPool>& pool) {
    return {.allocate = [pool](std::size_t bytes, std::size_t alignment) { return pool->take(bytes, alignment); },
            .free = [pool](void* data, std::size_t bytes) { pool->give_back(data, bytes); }};
  }

 private:
  void* take(std::size_t bytes, std::size_t alignment) {
    if (throws) throw OutOfPool();
    if (empty) return nullptr;
    EXPECT_EQ(alignment, arena_alignment);
    auto* const data = static_cast<std::byte*>(::operator new(bytes + shift, std::align_val_t(alignment))) + shift;
    given[data] = bytes;
    return data;
  }
  void give_back(void* data, std::size_t bytes) {
    EXPECT_EQ(given.at(data), bytes);
    given.erase(data);
    ::operator delete(static_cast<std::byte*>(data) - shift, std::align_val_t(arena_alignment));
  }
};

std::unique_ptr<HostDevice> open_over(const std::shared_ptr<HostPool>& pool) {
  return std::make_unique<HostDevice>(
      HostDeviceOptions{.capacity = 1_MiB, .threads = 1, .update_threads = 1, .allocator = HostPool::allocator(pool)});
}

TEST(HostAllocator, GivesAllMemoryAndGetsItBack) {
  const auto pool = std::make_shared<HostPool>();
  auto device = open_over(pool);
  MemoryBlock longest = device->allocate(1000, "longest");
  {
    const MemoryBlock block = device->allocate(4097, "block");
    EXPECT_EQ(pool->given.at(block.data()), 4097U);
    EXPECT_EQ(device->allocated_bytes(), 5097U);
    const Stream stream = device->make_stream("stream");
    device->fill_zero(block.data(), block.bytes(), stream);
    device->synchronize(stream);
  }
  EXPECT_EQ(device->allocated_bytes(), 1000U);
  EXPECT_EQ(device->peak_bytes(), 5097U);
  device.reset();
  EXPECT_EQ(pool->given.size(), 1U) << "a block may outlive its device";
  longest = {};
  EXPECT_THAT(pool->given, IsEmpty());
}

TEST(HostAllocator, IsNotAskedBeyondTheCeiling) {
  const auto pool = std::make_shared<HostPool>();
  const auto device = open_over(pool);
  pool->throws = true;
  EXPECT_THROW((void)device->allocate(1_MiB + 1, "too much"), PlanError);
}

TEST(HostAllocator, ThatFailsLeavesNothingBooked) {
  const auto pool = std::make_shared<HostPool>();
  const auto device = open_over(pool);
  pool->throws = true;
  EXPECT_THROW((void)device->allocate(100, "block"), OutOfPool) << "of its own type";
  pool->throws = false;
  pool->empty = true;
  EXPECT_THAT([&] { (void)device->allocate(100, "block"); },
              ThrowsMessage<PlanError>(HasSubstr("the caller's allocator has no 100 B for 'block'")));
  pool->empty = false;
  pool->shift = 64;
  EXPECT_THAT([&] { (void)device->allocate(100, "block"); },
              ThrowsMessage<MisuseError>(HasSubstr("256 bytes of alignment were asked for")));
  EXPECT_THAT(pool->given, IsEmpty());
  EXPECT_EQ(device->allocated_bytes(), 0U);
}

TEST(HostAllocator, HasBothFunctionsOrNone) {
  DeviceAllocator half = HostPool::allocator(std::make_shared<HostPool>());
  half.free = nullptr;
  EXPECT_THROW(HostDevice({.capacity = 1_MiB, .allocator = half}), MisuseError);
}

}  // namespace
}  // namespace tandem
