// CUDA devices that read each other's memory: access to the other card is enabled once, and what fails reaches whoever
// waits.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <utility>
#include <vector>

#include "core/base/error.hpp"
#include "gpu_ops/device/runtime.hpp"
#include "tests/gpu_ops/device/device_testing.hpp"
#include "tests/gpu_ops/device/fake_device.hpp"

namespace tandem {
namespace {

using namespace literals;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::open_fake_device;
using testing::pattern;
using ::testing::ThrowsMessage;

constexpr std::size_t size = 5000;

fake_cuda::Machine two_cards() { return {.cards = {fake_cuda::Card{}, fake_cuda::Card{}}}; }

std::unique_ptr<CudaDevice> open_card(int ordinal) { return open_fake_device({.capacity = 1_MiB, .ordinal = ordinal}); }

/// A copy from `peer` and back of the answer. Returns whether the bytes are right.
bool copy_across(CudaDevice& device, CudaDevice& peer) {
  const MemoryBlock from = peer.allocate(size, "from");
  const MemoryBlock to = device.allocate(size, "to");
  Stream writes = peer.make_stream("writes");
  Stream reads = device.make_stream("reads");
  Event written = peer.make_event();
  const std::vector<std::byte> values = pattern(size, 3);
  std::vector<std::byte> back(size);
  peer.copy(from.data(), values.data(), size, CopyKind::host_to_device, writes);
  peer.record(written, writes);
  device.wait_for_peer(reads, peer, written);
  device.copy_from(peer, to.data(), from.data(), size, reads);
  device.copy(back.data(), to.data(), size, CopyKind::device_to_host, reads);
  // Streams end before the memory that they use, whatever has failed.
  std::exception_ptr failure;
  try {
    device.synchronize(reads);
    // A card that is lost under its own work is not seen by the others.
    peer.synchronize(writes);
  } catch (const DeviceError&) {
    failure = std::current_exception();
  }
  reads = Stream();
  writes = Stream();
  if (failure) std::rethrow_exception(failure);
  return back == values;
}

/// How often access to a peer has been enabled, or asked for, since.
class Enabled {
 public:
  Enabled() { fake_cuda::fail_call("cudaDeviceEnablePeerAccess", -1, cudaSuccess); }
  std::int64_t times() const { return fake_cuda::calls(); }
};

TEST(CudaPeers, EnableAccessOnceAndInTheDirectionOfTheCopy) {
  fake_cuda::install(two_cards());
  {
    const auto device = open_card(0);
    const auto peer = open_card(1);
    const Enabled enabled;
    EXPECT_TRUE(copy_across(*device, *peer));
    EXPECT_TRUE(copy_across(*device, *peer));
    EXPECT_THAT(fake_cuda::peers(), ElementsAre(std::pair(0, 1)));
    EXPECT_EQ(enabled.times(), 1);
    EXPECT_TRUE(copy_across(*peer, *device));
    EXPECT_THAT(fake_cuda::peers(), ElementsAre(std::pair(0, 1), std::pair(1, 0)));
    EXPECT_EQ(fake_cuda::current_context(), -1) << "the caller had none";
  }
  EXPECT_EQ(fake_cuda::census(), fake_cuda::Census());
  EXPECT_THAT(fake_cuda::complaints(), IsEmpty());
}

TEST(CudaPeers, FindAccessEnabledByAnotherDeviceOfTheCard) {
  fake_cuda::install(two_cards());
  const auto device = open_card(0);
  const auto again = open_card(0);
  const auto peer = open_card(1);
  EXPECT_TRUE(copy_across(*device, *peer));
  EXPECT_TRUE(copy_across(*again, *peer));
  EXPECT_EQ(cudaGetLastError(), cudaSuccess) << "the next call would be blamed";
}

std::size_t free_on(int card) {
  const gpu::runtime::CurrentDevice current(card);
  return gpu::runtime::free_memory().free;
}

TEST(CudaPeers, MapWhatEitherHasPinned) {
  constexpr std::size_t memory = 300_MiB, pinned = 8_MiB, tables = pinned / 512;
  fake_cuda::install({.cards = std::vector<fake_cuda::Card>(3, {.memory = memory})});
  {
    const auto device = open_card(0), peer = open_card(1);
    {
      const MemoryBlock block = device->allocate_pinned(pinned, "state");
      for (const int card : {0, 1}) EXPECT_EQ(free_on(card), memory - tables) << card;
      const auto later = open_card(2);
      EXPECT_EQ(free_on(2), memory - tables) << "its context came after";
    }
    for (const int card : {0, 1, 2}) EXPECT_EQ(free_on(card), memory) << card;
    void* rest = nullptr;
    const gpu::runtime::CurrentDevice current(1);
    ASSERT_EQ(cudaMalloc(&rest, memory), cudaSuccess);
    EXPECT_THROW(device->allocate_pinned(pinned, "state"), DeviceError) << "a card has no room for the tables";
    EXPECT_EQ(cudaFree(rest), cudaSuccess);
  }
  EXPECT_EQ(fake_cuda::census(), fake_cuda::Census());
  EXPECT_THAT(fake_cuda::complaints(), IsEmpty());
}

TEST(CudaPeers, CopyWithoutAccess) {
  fake_cuda::Machine machine = two_cards();
  machine.peers = false;
  fake_cuda::install(machine);
  const auto device = open_card(0);
  const auto peer = open_card(1);
  const Enabled enabled;
  EXPECT_TRUE(copy_across(*device, *peer));
  EXPECT_EQ(enabled.times(), 0);
  EXPECT_THAT(fake_cuda::peers(), IsEmpty());
}

TEST(CudaPeers, CopyWhereAccessIsRefused) {
  fake_cuda::install(two_cards());
  const auto device = open_card(0);
  const auto peer = open_card(1);
  fake_cuda::fail_call("cudaDeviceEnablePeerAccess", 0, cudaErrorPeerAccessUnsupported);
  EXPECT_TRUE(copy_across(*device, *peer));
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

/// Cards of a machine of which the driver says that they reach each other, and whose copies arrive changed.
class CudaPeersThatBreak : public ::testing::Test {
 protected:
  void open(const fake_cuda::Machine& machine) {
    fake_cuda::install(machine);
    device_ = open_fake_device(
        {.capacity = 1_MiB, .slower_peers = [this](const std::string& text) { told_.push_back(text); }});
    peer_ = open_card(1);
  }
  ~CudaPeersThatBreak() override { EXPECT_THAT(fake_cuda::complaints(), IsEmpty()); }
  std::vector<std::string> told_;
  std::unique_ptr<CudaDevice> device_, peer_;
};

TEST_F(CudaPeersThatBreak, CopyThroughTheHostAndSaySoOnce) {
  fake_cuda::Machine machine = two_cards();
  machine.cards.push_back({});
  machine.breaks_straight_copies = true;
  open(machine);
  const auto third = open_card(2);
  for (int i = 0; i < 2; ++i) {
    EXPECT_TRUE(copy_across(*device_, *peer_));
    EXPECT_TRUE(copy_across(*device_, *third));
  }
  EXPECT_THAT(told_,
              ElementsAre("copies from cuda:1 straight to cuda:0 arrive changed: they go through the host, which is "
                          "slower"));
  EXPECT_THAT(fake_cuda::peers(), IsEmpty());
}

TEST_F(CudaPeersThatBreak, AreRefusedWhereTheHostDoesNotHelp) {
  fake_cuda::Machine machine = two_cards();
  machine.breaks_straight_copies = machine.breaks_copies_between_cards = true;
  open(machine);
  EXPECT_THAT(
      [&] { copy_across(*device_, *peer_); },
      ThrowsMessage<DeviceError>(HasSubstr("copies from cuda:1 to cuda:0 cannot be used: they arrive changed, also "
                                           "through the host")));
}

TEST_F(CudaPeersThatBreak, AreRefusedWhereAnotherLibraryUsesThem) {
  fake_cuda::Machine machine = two_cards();
  machine.breaks_straight_copies = true;
  open(machine);
  {
    const gpu::runtime::CurrentDevice current(0);
    ASSERT_EQ(cudaDeviceEnablePeerAccess(1, 0), cudaSuccess);
  }
  EXPECT_THAT([&] { copy_across(*device_, *peer_); },
              ThrowsMessage<DeviceError>(HasSubstr("another library of this process has enabled them")));
  EXPECT_THAT(fake_cuda::peers(), ElementsAre(std::pair(0, 1))) << "its own affair";
}

TEST_F(CudaPeersThatBreak, AreNotTrustedUntried) {
  open({.cards = std::vector<fake_cuda::Card>(2, {.memory = 300_MiB})});
  void* rest = nullptr;
  const gpu::runtime::CurrentDevice current(1);
  const std::size_t free = gpu::runtime::free_memory().free;
  ASSERT_EQ(cudaMalloc(&rest, free - 2 * size - 1024), cudaSuccess);
  EXPECT_TRUE(copy_across(*device_, *peer_));
  EXPECT_THAT(told_, ElementsAre(HasSubstr("cannot be tried for want of memory")));
  EXPECT_EQ(cudaFree(rest), cudaSuccess);
}

TEST(CudaPeers, MayBeOneCard) {
  fake_cuda::install({});
  const auto device = open_card(0);
  const auto peer = open_card(0);
  const Enabled enabled;
  EXPECT_TRUE(copy_across(*device, *peer));
  EXPECT_EQ(enabled.times(), 0) << "a card has no access to enable to itself";
  const MemoryBlock of_peer = peer->allocate(64, "of the peer");
  const MemoryBlock own = device->allocate(64, "own");
  Stream stream = device->make_stream("a");
  EXPECT_THROW(device->copy_from(*peer, own.data(), own.data(), 64, stream), MisuseError) << "it is not the peer's";
  EXPECT_THROW(device->copy_from(*peer, of_peer.data(), of_peer.data(), 64, stream), MisuseError);
}

TEST(CudaPeers, AFailedStreamFailsWhoeverWaits) {
  fake_cuda::install(two_cards());
  const auto device = open_card(0);
  const auto peer = open_card(1);
  const MemoryBlock block = peer->allocate(64, "block");
  Stream bad = peer->make_stream("bad");
  Stream waits = device->make_stream("waits");
  Stream other = device->make_stream("other");
  Event before = peer->make_event();
  Event after = peer->make_event();
  peer->record(before, bad);
  fake_cuda::fail_call("cudaMemsetAsync", 0, cudaErrorInvalidValue);
  peer->fill_zero(block.data(), 64, bad);
  peer->record(after, bad);
  device->wait_for_peer(other, *peer, before);
  device->wait_for_peer(waits, *peer, after);
  EXPECT_THAT([&] { device->synchronize(waits); },
              ThrowsMessage<DeviceError>(HasSubstr("cuda:1: queueing a fill: invalid argument")));
  EXPECT_NO_THROW(device->synchronize(other)) << "recorded before the failure";
}

std::int64_t calls_of_a_copy() {
  fake_cuda::install(two_cards());
  const auto device = open_card(0);
  const auto peer = open_card(1);
  fake_cuda::fail_call(-1, cudaSuccess);
  EXPECT_TRUE(copy_across(*device, *peer));
  return fake_cuda::calls();
}

TEST(CudaPeers, AnyCallThatFailsOnceIsANamedErrorOrNone) {
  const std::int64_t calls = calls_of_a_copy();
  ASSERT_GT(calls, 30);
  for (const cudaError_t code : {cudaErrorInvalidValue, cudaErrorECCUncorrectable}) {
    int failures = 0;
    for (std::int64_t position = 0; position < calls; ++position) {
      fake_cuda::install(two_cards());
      {
        const auto device = open_card(0);
        const auto peer = open_card(1);
        fake_cuda::fail_call(position, code);
        try {
          EXPECT_TRUE(copy_across(*device, *peer)) << "call " << position;
        } catch (const DeviceError& error) {
          ++failures;
          EXPECT_THAT(error.what(), HasSubstr("cuda:")) << "call " << position;
        }
      }
      EXPECT_EQ(fake_cuda::census(), fake_cuda::Census()) << "call " << position;
      EXPECT_THAT(fake_cuda::complaints(), IsEmpty()) << "call " << position;
    }
    // The rest are calls that give something back, and those that ask for access: copies do without it.
    EXPECT_GT(failures, calls / 4);
  }
}

}  // namespace
}  // namespace tandem
