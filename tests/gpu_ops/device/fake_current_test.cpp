// On which cards a run makes a context: its own, and no other that a thread of it would take by default.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "core/base/error.hpp"
#include "gpu_ops/device/native_stream.hpp"
#include "tests/gpu_ops/device/fake_device.hpp"

namespace tandem {
namespace {

using namespace literals;
using namespace std::chrono_literals;
using ::testing::ElementsAre;
using testing::open_fake_device;

void install_two_cards() { fake_cuda::install({.cards = {fake_cuda::Card{}, fake_cuda::Card{}}}); }

int current_device() {
  int ordinal = -1;
  EXPECT_EQ(cudaGetDevice(&ordinal), cudaSuccess);
  return ordinal;
}

/// Everything that is made on a device, and given back with it.
struct Everything {
  explicit Everything(CudaDevice& device)
      : block(device.allocate(4096, "block")),
        host(device.allocate_pinned(5_MiB, "host")),
        stream(device.make_stream("stream")),
        failed(device.make_stream("failed")),
        event(device.make_event()) {
    device.copy(block.data(), host.data(), 4096, CopyKind::host_to_device, stream);
    device.fill_zero(block.data(), 4096, stream);
    device.record(event, stream);
    device.wait(failed, event);
    device.call_after(stream, [](std::exception_ptr) {});
    EXPECT_TRUE(device.wait_for(event, 60s));
    device.synchronize(stream);
    // Streams that failed wait for what was queued before.
    fake_cuda::fail_call("cudaMemsetAsync", 0, cudaErrorInvalidValue);
    device.fill_zero(block.data(), 4096, failed);
    device.call_after(failed, [](std::exception_ptr) {});
    EXPECT_THROW(device.synchronize(failed), DeviceError);
  }
  MemoryBlock block, host;
  Stream stream, failed;
  Event event;
};

TEST(CurrentDevice, OfACardThatIsNotTheFirstLeavesTheFirstAlone) {
  install_two_cards();
  {
    const auto device = open_fake_device({.capacity = 1_MiB, .ordinal = 1});
    const Everything everything(*device);
    EXPECT_EQ(fake_cuda::current_context(), -1) << "the caller had none";
    EXPECT_EQ(current_device(), 0) << "what it asks for itself comes from the card that it expects";
  }
  EXPECT_THAT(fake_cuda::contexts(), ElementsAre(1));
  EXPECT_EQ(fake_cuda::census(), fake_cuda::Census());
}

TEST(CurrentDevice, IsThereForWhatAnotherThreadGivesBack) {
  install_two_cards();
  auto device = open_fake_device({.capacity = 1_MiB, .ordinal = 1});
  auto everything = std::make_unique<Everything>(*device);
  // Each in a thread that has used no device.
  const auto elsewhere = [](auto give_back) { std::thread(std::move(give_back)).join(); };
  elsewhere([&] { everything->block = {}; });
  elsewhere([&] { everything->host = {}; });
  elsewhere([&] { everything->stream = {}; });
  elsewhere([&] { everything->failed = {}; });
  elsewhere([&] { everything->event = {}; });
  elsewhere([&] { device.reset(); });
  EXPECT_THAT(fake_cuda::contexts(), ElementsAre(1));
  EXPECT_EQ(fake_cuda::census(), fake_cuda::Census());
}

TEST(CurrentDevice, OfTheCallerComesBack) {
  install_two_cards();
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  {
    const auto device = open_fake_device({.capacity = 1_MiB, .ordinal = 1});
    const Everything everything(*device);
    EXPECT_EQ(fake_cuda::current_context(), 0);
    // Whoever queues kernels stays on the card.
    static_cast<void>(native_stream(everything.stream));
    EXPECT_EQ(fake_cuda::current_context(), 1);
  }
  EXPECT_THAT(fake_cuda::contexts(), ElementsAre(0, 1));
}

}  // namespace
}  // namespace tandem
