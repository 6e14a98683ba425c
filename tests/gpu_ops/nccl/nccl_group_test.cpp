// Ranks that NCCL connects: whatever of it fails is told to all, nobody waits for ever, and no memory is used
// afterwards.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "comm/nccl/nccl_transport.hpp"
#include "cpu_ops/device/host_device.hpp"
#include "tests/comm/group_testing.hpp"
#include "tests/comm/processes/launch.hpp"
#include "tests/gpu_ops/device/fake_device.hpp"
#include "tests/gpu_ops/nccl/nccl_testing.hpp"

namespace tandem {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::Each;
using testing::fake_nccl;
using ::testing::Ge;
using ::testing::HasSubstr;
using testing::is_a;
using ::testing::IsEmpty;
using ::testing::Le;
using testing::message_of;
using testing::parts_of;
using ::testing::ResultOf;
using testing::value_of;
using testing::values_of;

auto says(const std::string& text) { return ResultOf(message_of, HasSubstr(text)); }

std::byte* bytes_of(const MemoryBlock& block) { return static_cast<std::byte*>(block.data()); }

class NcclGroup : public ::testing::Test {
 protected:
  NcclGroup() { fake_nccl().fail(nullptr, -1, 0); }
  ~NcclGroup() override {
    fake_nccl().fail(nullptr, -1, 0);
    EXPECT_THAT(testing::complaints_of_devices(), IsEmpty());
    EXPECT_EQ(fake_nccl().alive(), 0);
  }
};

constexpr std::size_t part = 700;

/// Whether a rank was told of a failure, and whether all bytes are right.
struct Outcome {
  bool told = false;
  bool right = true;
};

/// Two ranks gather twice and go, with memory that lasts until their streams have ended.
Outcome gather_twice(std::uint64_t seed) {
  Outcome outcome;
  try {
    testing::Ranks ranks(2, seed, 20.0);
    std::vector<MemoryBlock> blocks(2);
    std::vector<std::vector<std::byte>> seen(2);
    const auto errors = ranks.run([&](int rank) {
      MemoryBlock& block = blocks[static_cast<std::size_t>(rank)];
      block = ranks.device(rank).allocate(2 * part, "block");
      ranks.write(rank, block.data(), values_of(rank, 0, 2 * part));
      for (int i = 0; i < 2; ++i)
        ranks.group(rank).all_gather(bytes_of(block), parts_of({part, part}), ranks.stream(rank));
      seen[static_cast<std::size_t>(rank)] = ranks.read(rank, block.data(), 2 * part);
    });
    for (int rank = 0; rank < 2; ++rank) ranks.end_stream(rank);
    EXPECT_THAT(errors, Each(AnyOf(nullptr, ResultOf(is_a<DeviceError>, true))));
    for (const std::exception_ptr& error : errors) outcome.told |= error != nullptr;
    for (const auto& bytes : seen) {
      outcome.right &= bytes.size() == 2 * part;
      for (std::size_t i = 0; i < bytes.size(); ++i) outcome.right &= bytes[i] == value_of(i < part ? 0 : 1, 0, i);
    }
  } catch (const DeviceError&) {
    outcome.told = true;
  }
  return outcome;
}

TEST_F(NcclGroup, AnyCallThatFailsOnceIsToldOrDoesNoHarm) {
  int told = 0;
  constexpr std::int64_t calls = 60;  // calls of the start and of the first gathers
  for (std::int64_t position = 0; position < calls; ++position) {
    fake_nccl().fail(nullptr, position, fake_nccl::system_error);
    const Outcome outcome = gather_twice(static_cast<std::uint64_t>(position));
    EXPECT_TRUE(outcome.told || outcome.right) << "call " << position;
    told += outcome.told ? 1 : 0;
    EXPECT_EQ(fake_cuda::census(), fake_cuda::Census()) << "call " << position;
    EXPECT_EQ(fake_nccl().alive(), 0) << "call " << position;
    EXPECT_THAT(fake_cuda::complaints(), IsEmpty()) << "call " << position;
  }
  EXPECT_GT(told, 15);
}

TEST_F(NcclGroup, EachFunctionThatFailsIsNamedByNcclsWords) {
  for (const char* function : {"ncclGetUniqueId", "ncclCommInitRankConfig", "ncclCommGetAsyncError", "ncclGroupStart",
                               "ncclSend", "ncclRecv", "ncclGroupEnd"}) {
    fake_nccl().fail(function, 0, fake_nccl::system_error);
    std::string said;
    try {
      testing::Ranks ranks(2);
    } catch (const DeviceError& error) {
      said = error.what();
    }
    EXPECT_THAT(said, AllOf(HasSubstr("unhandled system error (2): planted in "), HasSubstr("NCCL"))) << function;
  }
}

/// Two ranks of which one queues a gather that the other, whose stream stands still, never makes.
TEST_F(NcclGroup, AnErrorOutsideOfCallsEndsTheGroupAndLetsStreamsGo) {
  testing::Ranks ranks(2);
  std::atomic<bool> open{false};
  fake_cuda::set_before_work([&](std::string_view stream, std::string_view work) {
    while (stream == "group" && work == "fill zero" && !open) std::this_thread::sleep_for(100us);
  });
  const auto errors = ranks.run([&](int rank) {
    const MemoryBlock block = ranks.device(rank).allocate(20, "block");
    if (rank == 1) ranks.device(1).fill_zero(block.data(), 20, ranks.stream(1));
    ranks.group(rank).all_gather(bytes_of(block), parts_of({10, 10}), ranks.stream(rank));
    std::vector<std::byte> flag(1);
    ranks.group(rank).broadcast(Channel::save, 0, flag);
    if (rank == 0) {
      fake_nccl().fail_outside_calls(fake_nccl::remote_error);
      ranks.device(0).synchronize(ranks.stream(0));
      EXPECT_FALSE(open) << "the other rank has given nothing";
      open = true;
    } else {
      while (!open) std::this_thread::sleep_for(1ms);
      ranks.device(1).synchronize(ranks.stream(1));
    }
    // Bytes that have not come are made nothing of.
    ranks.group(rank).broadcast(Channel::save, 0, flag);
  });
  EXPECT_THAT(errors, Each(says("NCCL failed: remote process exited")));
  fake_cuda::set_before_work(nullptr);
}

TEST_F(NcclGroup, ARankThatFailsLetsTheStreamsOfOthersGo) {
  testing::Ranks ranks(2);
  std::atomic<bool> open{false};
  fake_cuda::set_before_work([&](std::string_view stream, std::string_view work) {
    while (stream == "group" && work == "fill zero" && !open) std::this_thread::sleep_for(100us);
  });
  const auto errors = ranks.run([&](int rank) {
    const MemoryBlock block = ranks.device(rank).allocate(20, "block");
    if (rank == 1) ranks.device(1).fill_zero(block.data(), 20, ranks.stream(1));
    ranks.group(rank).all_gather(bytes_of(block), parts_of({10, 10}), ranks.stream(rank));
    if (rank == 1) ranks.group(1).fail(std::make_exception_ptr(DeviceError("planted")));
    if (rank == 0) {
      ranks.device(0).synchronize(ranks.stream(0));
      open = true;
    } else {
      while (!open) std::this_thread::sleep_for(1ms);
      ranks.device(1).synchronize(ranks.stream(1));
    }
    ranks.group(rank).all_gather(bytes_of(block), parts_of({10, 10}), ranks.stream(rank));
  });
  EXPECT_THAT(errors, Each(says("rank 1 failed: planted")));
  fake_cuda::set_before_work(nullptr);
}

/// Memory that a rank has shown may be freed once it has left.
TEST_F(NcclGroup, ARankLeavesOnceNobodyReadsItsMemory) {
  testing::Ranks ranks(2);
  std::atomic<bool> open{false};
  fake_cuda::set_before_work([&](std::string_view stream, std::string_view work) {
    while (stream == "nccl" && work == "nccl" && !open) std::this_thread::sleep_for(100us);
  });
  std::vector<MemoryBlock> blocks(2);
  const auto errors = ranks.run([&](int rank) {
    MemoryBlock& block = blocks[static_cast<std::size_t>(rank)];
    block = ranks.device(rank).allocate(20, "block");
    ranks.group(rank).all_gather(bytes_of(block), parts_of({10, 10}), ranks.stream(rank));
  });
  EXPECT_THAT(errors, Each(nullptr));
  std::atomic<bool> left{false};
  std::thread leaver([&] {
    ranks.group(0).leave();
    left = true;
  });
  std::this_thread::sleep_for(30ms);
  EXPECT_FALSE(left);
  open = true;
  leaver.join();
  for (int rank = 0; rank < 2; ++rank) ranks.end_stream(rank);
  fake_cuda::set_before_work(nullptr);
}

/// CUDA makes a caller wait where more launches are queued than it takes, which nobody could end.
TEST_F(NcclGroup, FewExchangesAreQueuedAtOnce) {
  testing::Ranks ranks(2);
  std::atomic<bool> open{false};
  fake_cuda::set_before_work([&](std::string_view stream, std::string_view work) {
    while (stream == "nccl" && work == "nccl" && !open) std::this_thread::sleep_for(100us);
  });
  std::atomic<int> queued{0};
  std::thread opener([&] {
    std::this_thread::sleep_for(300ms);
    EXPECT_LE(queued, 2 * 64) << "queued";
    EXPECT_GT(queued, 2 * 30);
    open = true;
  });
  const auto errors = ranks.run([&](int rank) {
    const MemoryBlock block = ranks.device(rank).allocate(20, "block");
    for (int i = 0; i < 150; ++i) {
      ranks.group(rank).all_gather(bytes_of(block), parts_of({10, 10}), ranks.stream(rank));
      ++queued;
    }
    ranks.device(rank).synchronize(ranks.stream(rank));
  });
  opener.join();
  EXPECT_THAT(errors, Each(nullptr));
  fake_cuda::set_before_work(nullptr);
}

// -- the start ----------------------------------------------------------------------------------------

/// Devices on the cards with these numbers.
std::vector<std::unique_ptr<CudaDevice>> open_cards(const std::vector<int>& cards) {
  fake_cuda::install({.cards = std::vector<fake_cuda::Card>(2)});
  std::vector<std::unique_ptr<CudaDevice>> devices;
  for (const int card : cards) {
    devices.push_back(testing::open_fake_device({.capacity = std::size_t{8} << 20, .ordinal = card}));
  }
  return devices;
}

std::string refusal_of(const std::vector<std::unique_ptr<CudaDevice>>& devices) {
  std::vector<Device*> views;
  for (const auto& device : devices) views.push_back(device.get());
  try {
    testing::connect(views, 20.0);
  } catch (const DeviceError& error) {
    return error.what();
  }
  return "";
}

TEST_F(NcclGroup, WrongBytesAreFoundAtTheStart) {
  const auto devices = open_cards({0, 1});
  const fake_nccl::Behaviour broken{.breaks_bytes = true};
  fake_nccl().behave(&broken);
  EXPECT_THAT(refusal_of(devices),
              AllOf(HasSubstr("NCCL moved wrong bytes from rank"), HasSubstr("NCCL_P2P_DISABLE=1")));
  const fake_nccl::Behaviour whole{};
  fake_nccl().behave(&whole);
  EXPECT_EQ(refusal_of(devices), "");
}

TEST_F(NcclGroup, OneCardForTwoRanksIsRefused) {
  EXPECT_THAT(refusal_of(open_cards({0, 0})), HasSubstr("connecting by NCCL 2.27.3 failed: invalid usage (5)"));
}

TEST_F(NcclGroup, TellsWhatConnectionsTakeOfTheDevice) {
  const auto devices = open_cards({0, 1});
  auto ranks = testing::launch_all(2);
  std::vector<std::size_t> taken(2);
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      const auto transport = make_nccl_transport(*ranks[rank].rendezvous, *devices[rank]);
      taken[rank] = transport->device_bytes();
    });
  }
  for (std::thread& thread : threads) thread.join();
  // Pinned memory of the start may be mapped when one of them counts.
  EXPECT_THAT(taken, Each(AllOf(Ge(std::size_t{1} << 20), Le((std::size_t{1} << 20) + 4096))));
}

TEST_F(NcclGroup, TakesNoOtherDevice) {
  HostDevice device({.capacity = std::size_t{1} << 20, .threads = 1, .update_threads = 1});
  auto ranks = testing::launch_all(1);
  EXPECT_THROW(make_nccl_transport(*ranks[0].rendezvous, device), MisuseError);
}

/// One that is alone loads nothing and connects with nobody.
TEST_F(NcclGroup, OfOneNeedsNoNccl) {
  testing::Ranks ranks(1);
  EXPECT_EQ(fake_nccl().calls(), 0);
}

}  // namespace
}  // namespace tandem
