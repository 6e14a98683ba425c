// Tests of a group that need a device which can be told when to fail and when to wait.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "comm/local_group.hpp"
#include "core/base/error.hpp"
#include "tests/comm/group_testing.hpp"
#include "tests/cpu_ops/host_device_testing.hpp"
#include "tests/offload/idle_device.hpp"

namespace tandem {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using testing::message_of;
using testing::parts_of;
using ::testing::ThrowsMessage;

constexpr std::size_t part = 1000;

std::byte* bytes_of(const MemoryBlock& block) { return static_cast<std::byte*>(block.data()); }

/// Three ranks, the second of which stops before it copies from others, until it is told to go on.
class HostGroup : public ::testing::Test {
 protected:
  HostGroup() {
    for (int rank = 0; rank < 3; ++rank) {
      HostDeviceOptions options = small();
      if (rank == 1) options.faults = faults_;
      devices_.push_back(std::make_unique<HostDevice>(options));
      views_.push_back(devices_.back().get());
      streams_.push_back(devices_.back()->make_stream("group"));
      blocks_.push_back(devices_.back()->allocate(3 * part, "block"));
    }
    groups_ = make_local_group(views_, 20.0);
  }
  ~HostGroup() override {
    open_ = true;
    streams_.clear();
  }

  void all_gather(std::size_t rank) { groups_[rank]->all_gather(bytes_of(blocks_[rank]), parts_, streams_[rank]); }

  /// Calls `body` for each rank on a thread of its own. Returns what they threw.
  template <class Body>
  std::array<std::exception_ptr, 3> run(const Body& body) {
    std::array<std::exception_ptr, 3> errors;
    std::vector<std::thread> threads;
    for (std::size_t rank = 0; rank < 3; ++rank) {
      threads.emplace_back([&, rank] {
        try {
          body(rank);
        } catch (...) {
          errors[rank] = std::current_exception();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    return errors;
  }

  std::atomic<bool> open_{false};
  std::shared_ptr<HostFaults> faults_ =
      std::make_shared<HostFaults>(HostFaults{.before_task = [this](std::string_view, std::string_view task) {
        while (task == "copy from peer" && !open_) std::this_thread::sleep_for(100us);
      }});
  const std::vector<ByteRange> parts_ = parts_of({part, part, part});
  std::vector<std::unique_ptr<HostDevice>> devices_;
  std::vector<Device*> views_;
  std::vector<MemoryBlock> blocks_;
  std::vector<Stream> streams_;
  std::vector<std::unique_ptr<Group>> groups_;
};

TEST_F(HostGroup, ACallDoesNotWaitForTheCopies) {
  EXPECT_THAT(run([&](std::size_t rank) { all_gather(rank); }), Each(nullptr));
  Event end = devices_[0]->make_event();
  devices_[0]->record(end, streams_[0]);
  EXPECT_FALSE(devices_[0]->wait_for(end, 20ms)) << "another still reads what this one has shown";
  open_ = true;
  EXPECT_TRUE(devices_[0]->wait_for(end, 60s));
}

TEST_F(HostGroup, AFailedStreamFailsThoseOfAll) {
  open_ = true;
  devices_[2]->enqueue(streams_[2], "bad", [] { throw DeviceError("bit flipped"); });
  EXPECT_THAT(run([&](std::size_t rank) { all_gather(rank); }), Each(nullptr)) << "told by whoever waits for a stream";
  for (std::size_t rank = 0; rank < 3; ++rank) {
    EXPECT_THAT([&] { devices_[rank]->synchronize(streams_[rank]); },
                ThrowsMessage<DeviceError>(HasSubstr("bit flipped")));
  }
}

/// Rank 2 cannot take its part while rank 1 still reads those of all.
TEST_F(HostGroup, ACallThatFailsEndsOnceNobodyReads) {
  std::atomic<int> ended{0};
  std::atomic<int> ended_early{0};
  std::thread opener([&] {
    std::this_thread::sleep_for(50ms);
    ended_early = ended.load();
    open_ = true;
  });
  blocks_[2] = devices_[2]->allocate(3 * part, "too small for what it is to take");
  const MemoryBlock shown = devices_[2]->allocate(3 * part, "shown");
  const auto errors = run([&](std::size_t rank) {
    try {
      // Rank 2 receives into memory that is not its device's.
      std::byte* const to = rank == 2 ? nullptr : bytes_of(blocks_[rank]);
      groups_[rank]->all_to_all(rank == 2 ? bytes_of(shown) : bytes_of(blocks_[rank]), parts_, to, streams_[rank]);
    } catch (...) {
      ++ended;
      blocks_[rank] = MemoryBlock();
      throw;
    }
  });
  opener.join();
  EXPECT_EQ(ended_early, 0);
  EXPECT_THAT(message_of(errors[2]), HasSubstr("copy from a peer writes"));
  EXPECT_THAT(message_of(errors[0]), AllOf(HasSubstr("failed"), HasSubstr("copy from a peer")));
  EXPECT_NO_THROW(devices_[1]->synchronize(streams_[1])) << "what it read was there";
}

/// The stream of the member has failed since the call: it cannot know by that when the others have read.
TEST_F(HostGroup, AMemberThatGoesWaitsUntilNobodyReads) {
  EXPECT_THAT(run([&](std::size_t rank) { all_gather(rank); }), Each(nullptr));
  devices_[0]->enqueue(streams_[0], "bad", [] { throw DeviceError("bit flipped"); });
  std::atomic<bool> gone{false};
  std::thread leaver([&] {
    groups_[0].reset();
    gone = true;
    blocks_[0] = MemoryBlock();
  });
  std::this_thread::sleep_for(30ms);
  EXPECT_FALSE(gone) << "rank 1 has not read yet";
  open_ = true;
  leaver.join();
  EXPECT_NO_THROW(devices_[1]->synchronize(streams_[1]));
}

/// The first of two members of one device waits for the other like for any.
TEST(LocalGroup, MayBeOfOneDeviceAlone) {
  HostDevice device(small());
  const std::vector<Device*> views = {&device, &device};
  const auto groups = make_local_group(views);
  const std::vector<ByteRange> parts = parts_of({part, part});
  std::vector<std::vector<std::byte>> seen(2);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      const auto at = static_cast<std::size_t>(rank);
      const MemoryBlock block = device.allocate(2 * part, "block");
      const Stream stream = device.make_stream("group");
      const std::vector<std::byte> values = testing::values_of(rank, 0, 2 * part);
      device.copy(block.data(), values.data(), 2 * part, CopyKind::host_to_device, stream);
      groups[at]->all_gather(bytes_of(block), parts, stream);
      seen[at].resize(2 * part);
      device.copy(seen[at].data(), block.data(), 2 * part, CopyKind::device_to_host, stream);
      device.synchronize(stream);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (std::size_t i = 0; i < 2 * part; ++i) {
    ASSERT_EQ(seen[0][i], testing::value_of(i < part ? 0 : 1, 0, i));
    ASSERT_EQ(seen[1][i], seen[0][i]);
  }
}

TEST(LocalGroup, IsRefusedWhereThereAreNoDevicesOfOneKind) {
  HostDevice device(small());
  testing::IdleDevice foreign;
  std::vector<Device*> none;
  std::vector<Device*> null = {&device, nullptr};
  std::vector<Device*> mixed = {&device, &foreign};
  EXPECT_THROW(make_local_group(none), MisuseError);
  EXPECT_THROW(make_local_group(null), MisuseError);
  EXPECT_THAT([&] { make_local_group(mixed); }, ThrowsMessage<MisuseError>(HasSubstr("'none'")));
}

}  // namespace
}  // namespace tandem
