// The fake keeps device memory from whoever is not a stream, and host memory from kernels: else what crashes on a GPU
// would pass here.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "gpu_ops/ops/cuda_ops.hpp"
#include "tests/gpu_ops/device/fake_device.hpp"

namespace tandem {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::open_fake_device;
using ::testing::SizeIs;

class GuardedMemory : public ::testing::Test {
 protected:
  void SetUp() override {
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    fake_cuda::install({.guarded = true});
  }
  void TearDown() override { fake_cuda::install({}); }
};

TEST_F(GuardedMemory, IsReachedByStreamsAlone) {
  const auto device = open_fake_device();
  const Stream stream = device->make_stream("stream");
  const MemoryBlock block = device->allocate(1024, "block");
  const std::vector<float> values(256, 3.0F);
  std::vector<float> back(256);
  device->copy(block.data(), values.data(), 1024, CopyKind::host_to_device, stream);
  const TensorView view{block.data(), DType::f32, {256}};
  device->ops().add(view, view, view, stream);
  device->copy(back.data(), block.data(), 1024, CopyKind::device_to_host, stream);
  device->synchronize(stream);
  EXPECT_EQ(back, std::vector<float>(256, 6.0F));
  EXPECT_THAT(fake_cuda::complaints(), IsEmpty());
  EXPECT_DEATH(static_cast<volatile float*>(block.data())[0] = 1.0F, "") << "a host that writes device memory";
  EXPECT_DEATH(std::memcpy(back.data(), block.data(), 1024), "") << "a host that reads it";
}

// Padding between the members of a structure may look like an address of the host, unless it can be cleared.
#if __has_builtin(__builtin_clear_padding)
constexpr bool sees_structures = true;
#else
constexpr bool sees_structures = false;
#endif

TEST_F(GuardedMemory, KernelsGetAddressesOfTheDevice) {
  const auto device = open_fake_device();
  const Stream stream = device->make_stream("stream");
  const MemoryBlock block = device->allocate(1024, "block");
  std::vector<float> on_host(256);
  const TensorView view{block.data(), DType::f32, {256}};
  device->ops().add(view, {on_host.data(), DType::f32, {256}}, view, stream);
  // In a structure, too.
  auto* const on_device = static_cast<bf16*>(block.data());
  device->ops().adamw({{on_device, on_device, on_host.data()}, on_device, on_device, 8}, AdamCoefficients{}, stream);
  device->synchronize(stream);
  const std::vector<std::string> complaints = fake_cuda::complaints();
  ASSERT_THAT(complaints, SizeIs(sees_structures ? 2 : 1));
  EXPECT_THAT(complaints.front(), HasSubstr("kernel add is given an address that is not on the device"));
  if (!sees_structures) return;
  EXPECT_THAT(complaints.back(), HasSubstr("kernel adamw is given an address that is not"));
}

}  // namespace
}  // namespace tandem
