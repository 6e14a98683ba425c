// Devices of one kind that read each other's memory.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <vector>

#include "core/base/error.hpp"
#include "tests/core/device/any_device.hpp"
#include "tests/offload/idle_device.hpp"

namespace tandem {
namespace {

using namespace literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

std::byte* bytes_of(const MemoryBlock& block) { return static_cast<std::byte*>(block.data()); }

/// Contents of a device's memory at `from`, once everything queued on `stream` is done.
std::vector<std::byte> read(Device& device, const void* from, std::size_t bytes, StreamView stream) {
  std::vector<std::byte> values(bytes);
  device.copy(values.data(), from, bytes, CopyKind::device_to_host, stream);
  device.synchronize(stream);
  return values;
}

/// Keeps a stream busy for a while.
void delay(Device& device, const MemoryBlock& block, StreamView stream) {
  for (int i = 0; i < 8; ++i) device.fill_zero(block.data(), block.bytes(), stream);
}

/// Fills a block with one value. The copied pages are never freed: streams may read them late.
void fill(Device& device, const MemoryBlock& block, std::byte value, StreamView stream) {
  static std::map<std::byte, std::vector<std::byte>> pages;
  std::vector<std::byte>& page = pages[value];
  if (page.size() < block.bytes()) page = std::vector<std::byte>(100003, value);
  device.copy(block.data(), page.data(), block.bytes(), CopyKind::host_to_device, stream);
}

/// A buffer that its owner fills anew as soon as the other has read it: both waits are needed in each round.
TEST(AnyPeers, CopiesKeepOrderByEventsOfThePeer) {
  TANDEM_ANY_PEERS_OR_SKIP(device, peer);
  constexpr std::size_t bytes = 100003;
  const MemoryBlock busy = device.allocate(4_MiB, "busy");
  const MemoryBlock busy_too = peer.allocate(4_MiB, "busy");
  const MemoryBlock from = peer.allocate(bytes, "from");
  const MemoryBlock to = device.allocate(bytes, "to");
  Stream writes = peer.make_stream("writes");
  Stream reads = device.make_stream("reads");
  Event written = peer.make_event();
  Event was_read = device.make_event();
  for (int round = 0; round < 20; ++round) {
    peer.wait_for_peer(writes, device, was_read);
    delay(peer, busy_too, writes);
    fill(peer, from, std::byte(round + 1), writes);
    peer.record(written, writes);
    device.wait_for_peer(reads, peer, written);
    if (round % 2 == 1) delay(device, busy, reads);
    device.copy_from(peer, to.data(), from.data(), bytes, reads);
    device.record(was_read, reads);
    // The next round is queued before this one is done.
    if (round % 4 != 3) continue;
    ASSERT_EQ(read(device, to.data(), bytes, reads), std::vector<std::byte>(bytes, std::byte(round + 1))) << round;
  }
}

TEST(AnyPeers, APeersNextWriteWaitsForTheCopy) {
  TANDEM_ANY_PEERS_OR_SKIP(device, peer);
  constexpr std::size_t bytes = 100003;
  const MemoryBlock busy = device.allocate(4_MiB, "busy");
  const MemoryBlock from = peer.allocate(bytes, "from");
  const MemoryBlock to = device.allocate(bytes, "to");
  Stream writes = peer.make_stream("writes");
  Stream reads = device.make_stream("reads");
  Event written = peer.make_event();
  Event was_read = device.make_event();
  fill(peer, from, std::byte{1}, writes);
  peer.record(written, writes);
  device.wait_for_peer(reads, peer, written);
  delay(device, busy, reads);
  device.copy_from(peer, to.data(), from.data(), bytes, reads);
  device.record(was_read, reads);
  peer.wait_for_peer(writes, device, was_read);
  fill(peer, from, std::byte{2}, writes);
  EXPECT_EQ(read(device, to.data(), bytes, reads), std::vector<std::byte>(bytes, std::byte{1}));
  EXPECT_EQ(read(peer, from.data(), bytes, writes), std::vector<std::byte>(bytes, std::byte{2}));
}

TEST(AnyPeers, CopyTheirBytesAndNoOthers) {
  TANDEM_ANY_PEERS_OR_SKIP(device, peer);
  constexpr std::size_t bytes = 4099;
  const MemoryBlock from = peer.allocate(bytes, "from");
  const MemoryBlock to = device.allocate(bytes, "to");
  Stream writes = peer.make_stream("writes");
  Stream reads = device.make_stream("reads");
  std::vector<std::byte> values(bytes);
  for (std::size_t i = 0; i < bytes; ++i) values[i] = static_cast<std::byte>(i % 251 + 1);
  peer.copy(from.data(), values.data(), bytes, CopyKind::host_to_device, writes);
  peer.synchronize(writes);
  std::vector<std::byte> expected(bytes);
  for (const std::size_t size : {1U, 22U, 55U, 4000U}) {
    device.fill_zero(to.data(), bytes, reads);
    device.copy_from(peer, bytes_of(to) + 7, bytes_of(from) + 13, size, reads);
    device.copy_from(peer, bytes_of(to), bytes_of(from), 0, reads);
    std::fill(expected.begin(), expected.end(), std::byte{0});
    std::copy_n(values.begin() + 13, size, expected.begin() + 7);
    ASSERT_EQ(read(device, to.data(), bytes, reads), expected) << size;
  }
}

TEST(AnyPeers, ADeviceIsAPeerOfItself) {
  TANDEM_ANY_DEVICE_OR_SKIP(device);
  const MemoryBlock block = device.allocate(200, "block");
  Stream a = device.make_stream("a");
  Stream b = device.make_stream("b");
  Event filled = device.make_event();
  fill(device, block, std::byte{3}, a);
  device.fill_zero(bytes_of(block) + 100, 100, a);
  device.record(filled, a);
  device.wait_for_peer(b, device, filled);
  device.copy_from(device, bytes_of(block) + 100, block.data(), 100, b);
  EXPECT_EQ(read(device, block.data(), 200, b), std::vector<std::byte>(200, std::byte{3}));
  EXPECT_THROW(device.copy_from(device, bytes_of(block) + 1, block.data(), 100, b), MisuseError) << "they overlap";
}

TEST(AnyPeers, ReadAndWriteWhatIsTheirsAlone) {
  TANDEM_ANY_PEERS_OR_SKIP(device, peer);
  const MemoryBlock of_peer = peer.allocate(1000, "of the peer");
  const MemoryBlock own = device.allocate(1000, "own");
  std::vector<std::byte> host(1000);
  Stream stream = device.make_stream("a");
  const auto copy = [&](void* to, const void* from, std::size_t bytes) {
    return [&, to, from, bytes] { device.copy_from(peer, to, from, bytes, stream); };
  };
  EXPECT_THAT(copy(own.data(), bytes_of(of_peer) + 1, 1000),
              ThrowsMessage<MisuseError>(AllOf(HasSubstr("reads beyond the end of 'of the peer'"),
                                               HasSubstr("1000 bytes at offset 1 of 1000"))));
  EXPECT_THAT(copy(bytes_of(own) + 1, of_peer.data(), 1000),
              ThrowsMessage<MisuseError>(HasSubstr("writes beyond the end of 'own'")));
  EXPECT_THAT(copy(own.data(), own.data(), 10), ThrowsMessage<MisuseError>(HasSubstr("reads no allocation")));
  EXPECT_THAT(copy(of_peer.data(), of_peer.data(), 10), ThrowsMessage<MisuseError>(HasSubstr("writes no allocation")));
  EXPECT_THROW(copy(own.data(), host.data(), 10)(), MisuseError);
  EXPECT_THROW(copy(host.data(), of_peer.data(), 10)(), MisuseError);
  EXPECT_THROW(copy(own.data(), nullptr, 10)(), MisuseError);
  EXPECT_THROW(copy(nullptr, of_peer.data(), 10)(), MisuseError);
  EXPECT_NO_THROW(copy(own.data(), of_peer.data(), 1000)());
  device.synchronize(stream);
}

TEST(AnyPeers, RefuseStreamsAndEventsThatAreNotTheirs) {
  TANDEM_ANY_PEERS_OR_SKIP(device, peer);
  const MemoryBlock from = peer.allocate(8, "from");
  const MemoryBlock to = device.allocate(8, "to");
  Stream stream = device.make_stream("own");
  Stream of_peer = peer.make_stream("of the peer");
  Event event = peer.make_event();
  EXPECT_THAT([&] { device.copy_from(peer, to.data(), from.data(), 8, of_peer); },
              ThrowsMessage<MisuseError>(HasSubstr("'of the peer'")));
  EXPECT_THROW(device.copy_from(peer, to.data(), from.data(), 8, StreamView()), MisuseError);
  EXPECT_THROW(device.wait_for_peer(of_peer, peer, event), MisuseError);
  EXPECT_THROW(device.wait_for_peer(stream, peer, EventView()), MisuseError);
  EXPECT_NO_THROW(device.wait_for_peer(stream, peer, event)) << "never recorded is complete";
  device.synchronize(stream);
}

TEST(AnyPeers, AreOfOneKind) {
  TANDEM_ANY_DEVICE_OR_SKIP(device);
  testing::IdleDevice foreign;
  const MemoryBlock from = foreign.allocate(8, "from");
  const MemoryBlock to = device.allocate(8, "to");
  Stream stream = device.make_stream("a");
  Event event = foreign.make_event();
  EXPECT_THAT([&] { device.copy_from(foreign, to.data(), from.data(), 8, stream); },
              ThrowsMessage<MisuseError>(HasSubstr("of another kind")));
  EXPECT_THAT([&] { device.wait_for_peer(stream, foreign, event); },
              ThrowsMessage<MisuseError>(HasSubstr("of another kind")));
  device.synchronize(stream);
}

}  // namespace
}  // namespace tandem
