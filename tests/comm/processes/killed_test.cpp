// Processes that are killed or stand still are named to all others within seconds.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <string>
#include <thread>

#include "tests/comm/processes/ranks_in_processes.hpp"

namespace tandem {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::RanksInProcesses;
using ::testing::StartsWith;

/// Three ranks that wait in a meeting to which one of them does not come.
RanksInProcesses waiting_for(int absent, double silence_seconds) {
  const auto change = [&](RendezvousOptions& options) { options.silence_seconds = silence_seconds; };
  return RanksInProcesses(3, change, [absent](std::unique_ptr<Rendezvous> rendezvous, const auto& started) {
    started();
    while (rendezvous->rank().index == absent && !rendezvous->failure()) std::this_thread::sleep_for(1ms);
    rendezvous->meet(0, "values", "");
  });
}

class AKilledRank : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Number, AKilledRank, ::testing::Values(0, 1, 2),
                         [](const auto& each) { return std::to_string(each.param); });

TEST_P(AKilledRank, IsNamedToTheOthersAtOnce) {
  RanksInProcesses ranks = waiting_for(GetParam(), 30.0);
  const auto begin = std::chrono::steady_clock::now();
  ranks.signal(GetParam(), SIGKILL);
  for (int rank = 0; rank < 3; ++rank) {
    if (rank == GetParam()) continue;
    EXPECT_THAT(ranks.told(rank), AllOf(StartsWith("rank " + std::to_string(GetParam()) + " at "),
                                        HasSubstr(" is lost: its connection ended")));
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 5s);
}

class AStoppedRank : public AKilledRank {};
INSTANTIATE_TEST_SUITE_P(Number, AStoppedRank, ::testing::Values(0, 2),
                         [](const auto& each) { return std::to_string(each.param); });

TEST_P(AStoppedRank, IsNamedToAllAndToldWhenItGoesOn) {
  RanksInProcesses ranks = waiting_for(GetParam(), 1.0);
  const auto begin = std::chrono::steady_clock::now();
  ranks.signal(GetParam(), SIGSTOP);
  const std::string lost = "rank " + std::to_string(GetParam()) + " at ";
  for (int rank = 0; rank < 3; ++rank) {
    if (rank == GetParam()) continue;
    EXPECT_THAT(ranks.told(rank), AllOf(StartsWith(lost), HasSubstr(" is lost: no sign of life for 1 s")));
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 8s);
  ranks.signal(GetParam(), SIGCONT);
  // Rank 0 alone kept the group: to it the others are gone.
  EXPECT_THAT(ranks.told(GetParam()), HasSubstr(GetParam() == 0 ? "is lost: " : lost));
}

}  // namespace
}  // namespace tandem
