// Devices by name where the build has no CUDA.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "api/cuda_backend.hpp"
#include "api/open_device.hpp"
#include "core/base/error.hpp"

namespace tandem {
namespace {

using namespace literals;
using ::testing::ThrowsMessage;

DeviceOptions small() { return {.memory = 64_MiB, .threads = 1, .update_threads = 1}; }

TEST(WithoutCuda, AutoTakesTheHostAndSaysWhy) {
  std::string notice;
  DeviceOptions options = small();
  options.notice = [&](const std::string& why) { notice = why; };
  EXPECT_EQ(open_device("auto", options)->info().kind, "host");
  EXPECT_EQ(notice, "this build has no CUDA");
}

TEST(WithoutCuda, AGpuIsRefusedWithTheReason) {
  for (const char* name : {"cuda", "cuda:7"}) {
    EXPECT_THAT(
        [&] { (void)open_device(name, small()); },
        ThrowsMessage<DeviceError>(std::string("device '") + name + "': this build has no CUDA; use --device host"));
  }
  EXPECT_THROW((void)open_cuda(0, small()), DeviceError);
}

}  // namespace
}  // namespace tandem
