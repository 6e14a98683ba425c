// Ranks that are processes, with NCCL between them: bytes arrive, and one that is killed ends the calls of the others,
// whose streams go on, by its number.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <stdexcept>
#include <string>

#include "tests/comm/group_testing.hpp"
#include "tests/comm/processes/ranks_in_processes.hpp"
#include "tests/gpu_ops/device/fake_device.hpp"
#include "tests/gpu_ops/nccl/nccl_testing.hpp"

namespace tandem {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::RanksInProcesses;
using ::testing::StartsWith;

constexpr std::size_t large_part = 300007;  // more than a socket of the fake takes at once

/// Gathers again and again, each time to the end, until a call throws. Says so where bytes are wrong.
void gather_for_ever(std::unique_ptr<Rendezvous> rendezvous, const std::function<void()>& started, bool tells) {
  const Rank rank = rendezvous->rank();
  fake_cuda::install({.seed = static_cast<std::uint64_t>(rank.index) + 1, .longest_delay_us = 100});
  const fake_nccl::Behaviour behaviour{.longest_delay_us = 300, .tells_lost_ranks = tells};
  testing::fake_nccl().behave(&behaviour);
  const auto device = testing::open_fake_device({.capacity = std::size_t{8} << 20});
  const auto group = testing::group_by_nccl(std::move(rendezvous), *device, 30.0);
  const MemoryBlock block = device->allocate(3 * large_part, "block");
  auto* const bytes = static_cast<std::byte*>(block.data());
  const Stream stream = device->make_stream("group");
  const std::vector<ByteRange> parts = testing::parts_of({large_part, large_part, large_part});
  for (int round = 0;; ++round) {
    const std::vector<std::byte> values = testing::values_of(rank.index, round, 3 * large_part);
    std::vector<std::byte> seen(3 * large_part);
    device->copy(bytes, values.data(), 3 * large_part, CopyKind::host_to_device, stream);
    group->all_gather(bytes, parts, stream);
    device->copy(seen.data(), bytes, 3 * large_part, CopyKind::device_to_host, stream);
    device->synchronize(stream);
    std::vector<std::byte> flag(1);
    group->broadcast(Channel::save, 0, flag);  // throws where a rank has gone
    for (std::size_t i = 0; i < seen.size(); ++i) {
      if (seen[i] != testing::value_of(static_cast<int>(i / large_part), round, i))
        throw std::runtime_error("wrong bytes");
    }
    if (!fake_cuda::complaints().empty()) throw std::runtime_error(fake_cuda::complaints()[0]);
    if (round == 1) started();
  }
}

class AKilledNcclRank : public ::testing::TestWithParam<std::tuple<int, bool>> {};
INSTANTIATE_TEST_SUITE_P(Number, AKilledNcclRank, ::testing::Combine(::testing::Values(0, 1, 2), ::testing::Bool()),
                         [](const auto& each) {
                           return std::to_string(std::get<0>(each.param)) +
                                  (std::get<1>(each.param) ? "AsNcclTells" : "AsNcclWaits");
                         });

TEST_P(AKilledNcclRank, IsNamedToTheOthersAtOnce) {
  const auto [killed, tells] = GetParam();
  RanksInProcesses ranks(3, {}, [tells = tells](std::unique_ptr<Rendezvous> rendezvous, const auto& started) {
    gather_for_ever(std::move(rendezvous), started, tells);
  });
  const auto begin = std::chrono::steady_clock::now();
  ranks.signal(killed, SIGKILL);
  for (int rank = 0; rank < 3; ++rank) {
    if (rank == killed) continue;
    // NCCL may notice before the rendezvous does.
    EXPECT_THAT(ranks.told(rank),
                ::testing::AnyOf(AllOf(StartsWith("rank " + std::to_string(killed) + " at "), HasSubstr(" is lost")),
                                 HasSubstr("NCCL failed: remote process exited")));
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 8s);
}

}  // namespace
}  // namespace tandem
