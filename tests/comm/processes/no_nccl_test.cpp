// NCCL in a build without the CUDA device: nothing is loaded, and whoever asks for it is told.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/nccl/nccl_transport.hpp"
#include "core/base/error.hpp"
#include "tests/comm/processes/launch.hpp"
#include "tests/offload/idle_device.hpp"

namespace tandem {
namespace {

TEST(NoNccl, TakesNoDevice) {
  testing::IdleDevice device;
  auto ranks = testing::launch_all(1);
  EXPECT_THAT([&] { make_nccl_transport(*ranks[0].rendezvous, device); },
              ::testing::ThrowsMessage<MisuseError>(::testing::HasSubstr("of another kind: ")));
}

}  // namespace
}  // namespace tandem
