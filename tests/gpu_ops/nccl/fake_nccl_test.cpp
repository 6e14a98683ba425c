// The fake of NCCL counts as a complaint whatever NCCL leaves undefined.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "comm/nccl/communicator.hpp"
#include "core/base/error.hpp"
#include "gpu_ops/device/native_stream.hpp"
#include "tests/comm/group_testing.hpp"
#include "tests/gpu_ops/device/fake_device.hpp"
#include "tests/gpu_ops/nccl/nccl_testing.hpp"

namespace tandem {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr std::size_t size = 64;

/// Two cards, and on each a stream, memory and a communicator made by NCCL's own functions.
class FakeNcclComplains : public ::testing::Test {
 protected:
  struct Of {
    std::unique_ptr<CudaDevice> device;
    MemoryBlock block;
    Stream stream;
    ncclComm* comm = nullptr;
    std::byte* bytes() const { return static_cast<std::byte*>(block.data()); }
    CUstream_st* native() const { return native_stream(stream); }
  };

  void SetUp() override {
    fake_cuda::install({.cards = std::vector<fake_cuda::Card>(2)});
    testing::fake_nccl().behave(&behaviour_);
    nccl_ = &nccl::load();
    nccl::UniqueId id{};
    ASSERT_EQ(nccl_->get_unique_id(&id), nccl::success);
    for (int rank = 0; rank < 2; ++rank) {
      Of& of = ranks_[rank];
      of.device = testing::open_fake_device({.capacity = std::size_t{1} << 20, .ordinal = rank});
      of.block = of.device->allocate(size, "block");
      of.stream = of.device->make_stream("stream");
      nccl::Config config;
      config.blocking = 0;
      of.native();
      ASSERT_EQ(nccl_->init_rank(&of.comm, 2, id, rank, &config), nccl::in_progress);
    }
    for (Of& of : ranks_) settle(of);
  }
  void TearDown() override {
    for (Of& of : ranks_) {
      if (of.comm != nullptr) nccl_->abort(of.comm);
      of.stream = Stream();
    }
  }

  void settle(Of& of) const {
    int state = nccl::in_progress;
    while (state == nccl::in_progress) {
      ASSERT_EQ(nccl_->get_async_error(of.comm, &state), nccl::success);
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }
  int send(Of& of, std::size_t bytes, int peer) const {
    return nccl_->send(of.bytes(), bytes, nccl::byte_type, peer, of.comm, of.native());
  }
  int receive(Of& of, std::size_t bytes, int peer) const {
    return nccl_->receive(of.bytes(), bytes, nccl::byte_type, peer, of.comm, of.native());
  }
  void finalize(Of& of) {
    nccl_->finalize(of.comm);
    settle(of);
    nccl_->destroy(std::exchange(of.comm, nullptr));
  }

  const fake_nccl::Behaviour behaviour_{};
  const nccl::Library* nccl_ = nullptr;
  Of ranks_[2];
};

TEST_F(FakeNcclComplains, NotOfCallsThatAreRight) {
  send(ranks_[0], size, 1);
  settle(ranks_[0]);
  receive(ranks_[1], size, 0);
  settle(ranks_[1]);
  for (Of& of : ranks_) of.device->synchronize(of.stream);
  for (Of& of : ranks_) finalize(of);
  EXPECT_THAT(fake_cuda::complaints(), IsEmpty());
}

TEST_F(FakeNcclComplains, OfSizesThatDiffer) {
  send(ranks_[0], size, 1);
  settle(ranks_[0]);
  receive(ranks_[1], size - 1, 0);
  int state = nccl::success;
  while (state == nccl::success || state == nccl::in_progress) nccl_->get_async_error(ranks_[1].comm, &state);
  EXPECT_EQ(state, fake_nccl::invalid_usage);
  EXPECT_THAT(fake_cuda::complaints(), Contains("NCCL: rank 1 receives 63 bytes from rank 0, which sends 64"));
}

TEST_F(FakeNcclComplains, OfBytesThatNobodyReceives) {
  send(ranks_[0], size, 1);
  settle(ranks_[0]);
  ranks_[0].device->synchronize(ranks_[0].stream);
  finalize(ranks_[1]);
  EXPECT_THAT(fake_cuda::complaints(), Contains("NCCL: rank 0 has sent what nobody receives"));
}

TEST_F(FakeNcclComplains, OfPeersThatAreNone) {
  EXPECT_EQ(send(ranks_[0], size, 2), fake_nccl::invalid_usage);
  EXPECT_THAT(fake_cuda::complaints(), Contains("NCCL: a peer that is none"));
}

TEST_F(FakeNcclComplains, OfASendToItselfThatIsNotReceived) {
  send(ranks_[0], size, 0);
  settle(ranks_[0]);
  ranks_[0].device->synchronize(ranks_[0].stream);
  EXPECT_THAT(fake_cuda::complaints(), Contains("NCCL: a rank sends to itself and does not receive"));
}

TEST_F(FakeNcclComplains, OfGroupsThatWereNotBegun) {
  EXPECT_EQ(nccl_->group_end(), fake_nccl::invalid_usage);
  EXPECT_THAT(fake_cuda::complaints(), Contains("NCCL: the end of a group that was not begun"));
}

TEST_F(FakeNcclComplains, OfACommunicatorThatIsGone) {
  ncclComm* const gone = std::exchange(ranks_[0].comm, nullptr);
  nccl_->abort(gone);
  int state = 0;
  EXPECT_EQ(nccl_->get_async_error(gone, &state), fake_nccl::invalid_argument);
  EXPECT_THAT(fake_cuda::complaints(), Contains("NCCL: ncclCommGetAsyncError of a communicator that is gone"));
}

TEST_F(FakeNcclComplains, OfACommunicatorThatIsNotReady) {
  // Half of the groups are queued late. Whether the next call comes before that is up to the system: not every time.
  const fake_nccl::Behaviour slow{.longest_delay_us = 5'000};
  testing::fake_nccl().behave(&slow);
  for (int i = 0; i < 500 && send(ranks_[0], 1, 1) != fake_nccl::invalid_usage; ++i) {
  }
  EXPECT_THAT(fake_cuda::complaints(), Contains("NCCL: a communicator that is not ready"));
}

TEST_F(FakeNcclComplains, OfMemoryThatIsNotItsCards) {
  std::vector<std::byte> pageable(size);
  EXPECT_EQ(nccl_->send(pageable.data(), size, nccl::byte_type, 1, ranks_[0].comm, ranks_[0].native()),
            fake_nccl::invalid_argument);
  EXPECT_EQ(send(ranks_[0], size + 1, 1), fake_nccl::invalid_argument);
  EXPECT_THAT(fake_cuda::complaints(), Contains("NCCL is given memory that is not its card's"));
}

TEST_F(FakeNcclComplains, OfAStreamOfAnotherCard) {
  CUstream_st* const other = ranks_[1].native();
  EXPECT_EQ(nccl_->send(ranks_[0].bytes(), size, nccl::byte_type, 1, ranks_[0].comm, other), fake_nccl::invalid_usage);
  EXPECT_THAT(fake_cuda::complaints(), Contains("NCCL: a stream of another card"));
}

TEST_F(FakeNcclComplains, OfTwoThreadsAtATime) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      int state = 0;
      for (int n = 0; n % 1000 != 0 || (fake_cuda::complaints().empty() && std::chrono::steady_clock::now() < end);
           ++n) {
        nccl_->get_async_error(ranks_[0].comm, &state);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_THAT(fake_cuda::complaints(),
              Contains("NCCL: ncclCommGetAsyncError while another thread uses the communicator"));
}

TEST_F(FakeNcclComplains, OfACommunicatorThatBlocks) {
  nccl::Config config;
  ncclComm* comm = nullptr;
  EXPECT_EQ(nccl_->init_rank(&comm, 1, {}, 0, &config), fake_nccl::invalid_usage);
  EXPECT_THAT(fake_cuda::complaints(), Contains(HasSubstr("a communicator that blocks")));
}

}  // namespace
}  // namespace tandem
