// Ranks that wait say for whom, ever less often; those that cannot succeed end at once; and rank 0 tells once of a rank
// that it has refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "comm/assembly.hpp"
#include "core/base/error.hpp"
#include "core/base/reminder.hpp"
#include "tests/comm/group_testing.hpp"
#include "tests/comm/processes/launch.hpp"

namespace tandem {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::is_a;
using ::testing::IsEmpty;
using testing::Joined;
using testing::launch;
using testing::launch_all;
using testing::message_of;
using ::testing::Not;
using ::testing::SizeIs;
using ::testing::StartsWith;

TEST(Reminder, SpeaksSoonAndThenEverLessOften) {
  Reminder reminder(100.0, 3.0);
  std::vector<int> spoken;
  for (int second = 100; second < 400; ++second) {
    if (reminder.due(second)) spoken.push_back(second - 100);
  }
  EXPECT_THAT(spoken, ElementsAre(3, 9, 21, 45, 93, 153, 213, 273));
}

/// Seconds at which an assembly of three has told a rank for whom it waits, and the lines.
using TimedLines = std::vector<std::pair<int, std::string>>;

TimedLines waits_told_by(const std::vector<int>& there, int rank, int seconds) {
  TimedLines told;
  int now = 0;
  Assembly assembly(3, 1, {}, 0.0, [&](int to, const Message& message) {
    if (to == rank && message.kind == MessageKind::waiting) told.emplace_back(now, message.fields.at(0));
  });
  for (const int each : there) {
    assembly.enter(each, 3, "10.0.0." + std::to_string(each) + ":29500");
    assembly.take(each, {.kind = MessageKind::facts}, 0.0);
  }
  for (; now <= seconds; ++now) assembly.look(now, now >= 9 ? 2 : 0);
  return told;
}

TEST(AWaitForRanks, IsToldToThoseThatAreThere) {
  EXPECT_THAT(waits_told_by({0, 2}, 1, 20), IsEmpty());
  for (const int rank : {0, 2}) {
    EXPECT_THAT(waits_told_by({0, 2}, rank, 20),
                ElementsAre(std::pair(3, "waiting for rank 1 of 3 at 10.0.0.0:29500, for another 297 s"),
                            std::pair(9,
                                      "waiting for rank 1 of 3 at 10.0.0.0:29500, for another 291 s (2 connections "
                                      "had another secret, and were refused)")));
  }
  const TimedLines alone = waits_told_by({0}, 0, 301);
  EXPECT_THAT(alone, SizeIs(8));
  EXPECT_THAT(alone.back().second, HasSubstr("waiting for rank 1, rank 2 of 3"));
}

TEST(AWaitForRanks, IsNoneWhereAllHaveCome) { EXPECT_THAT(waits_told_by({0, 1, 2}, 0, 100), IsEmpty()); }

/// Lines of each rank.
class Lines {
 public:
  testing::Change listening() {
    return [this](RendezvousOptions& options) {
      const int rank = options.rank.index;
      options.notice = [this, rank](const std::string& line) { take(notices_, rank, line); };
      options.warning = [this, rank](const std::string& line) { take(warnings_, rank, line); };
    };
  }
  std::vector<std::string> notices(int rank) { return notices_[rank]; }
  std::vector<std::string> warnings(int rank) { return warnings_[rank]; }

 private:
  using ByRank = std::map<int, std::vector<std::string>>;
  void take(ByRank& lines, int rank, const std::string& line) {
    const std::lock_guard lock(mutex_);
    lines[rank].push_back(line);
  }
  std::mutex mutex_;
  ByRank notices_;
  ByRank warnings_;
};

TEST(ARankThatWaits, SaysForWhom) {
  Lines lines;
  const auto listening = lines.listening();
  const auto ranks = launch(3, {1}, [&](RendezvousOptions& options) {
    options.limits = {.join_seconds = 2.0, .silent_seconds = 0.3};
    listening(options);
  });
  EXPECT_THAT(message_of(ranks[0].error), HasSubstr("rank 2 did not come within 2 s"));
  for (const int rank : {0, 1}) {
    const auto said = lines.notices(rank);
    EXPECT_THAT(said, AllOf(Not(IsEmpty()), SizeIs(::testing::Le(2U))));
    EXPECT_THAT(said, Each(StartsWith("rank " + std::to_string(rank) + ": waiting for rank 2 of 3 at 127.0.0.1:")));
  }
  EXPECT_THAT(lines.warnings(0), IsEmpty());
}

TEST(ARankThatWaits, SaysThatANameIsOfThisMachineAlone) {
  Lines lines;
  launch(2, {}, [&](RendezvousOptions& options) {
    options.host = "localhost";
    options.limits = {.join_seconds = 1.0, .silent_seconds = 0.3};
    lines.listening()(options);
  });
  EXPECT_THAT(lines.notices(0), AllOf(Not(IsEmpty()), Each(AllOf(HasSubstr(" at localhost:"),
                                                                 HasSubstr("which other machines cannot reach")))));
}

TEST(ARankThatWaits, SaysWhatItTries) {
  Lines lines;
  RendezvousOptions options = testing::options_for(1, 2);
  options.port = 1;
  options.limits = {.join_seconds = 1.0, .silent_seconds = 0.2};
  lines.listening()(options);
  EXPECT_THAT(message_of(testing::join(options).error), HasSubstr("rank 1 cannot reach rank 0 at 127.0.0.1:1"));
  EXPECT_THAT(lines.notices(1), AllOf(Not(IsEmpty()), Each(StartsWith("rank 1: waiting for rank 0 at 127.0.0.1:1: "
                                                                      "Connection refused; trying for another "))));
}

TEST(ARankThatWaits, SaysNothingWhereAllComeSoon) {
  Lines lines;
  const auto ranks = launch_all(3, lines.listening());
  for (const Joined& each : ranks) EXPECT_EQ(message_of(each.error), "");
  for (int rank = 0; rank < 3; ++rank) EXPECT_THAT(lines.notices(rank), IsEmpty());
}

TEST(ANameThatStandsForNoAddress, EndsARankAtOnce) {
  for (const int rank : {0, 1}) {
    RendezvousOptions options = testing::options_for(rank, 2);
    options.host = "no-such-host.invalid";
    options.limits.join_seconds = 600.0;
    const Joined joined = testing::join(options);
    EXPECT_TRUE(is_a<UsageError>(joined.error));
    EXPECT_THAT(message_of(joined.error),
                AllOf(HasSubstr("rank " + std::to_string(rank) + ": MASTER_ADDR 'no-such-host.invalid' stands for no"),
                      HasSubstr("set it to the name or number of an address of rank 0's machine")));
  }
}

TEST(ARankWithAnotherSecret, IsToldOfOnce) {
  Lines lines;
  std::vector<Joined> refused;
  const auto ranks = launch_all(3, lines.listening(), [&](int port) {
    for (const int rank : {2, 1, 2}) {
      RendezvousOptions options = testing::options_for(rank, 3);
      options.port = port;
      options.secret = "another";
      refused.push_back(testing::join(options));
    }
  });
  for (const Joined& each : ranks) EXPECT_EQ(message_of(each.error), "");
  for (const Joined& each : refused) {
    EXPECT_TRUE(is_a<UsageError>(each.error));
    EXPECT_THAT(message_of(each.error), HasSubstr("is refused by rank 0 at 127.0.0.1:"));
    EXPECT_THAT(message_of(each.error), HasSubstr("its secret differs from rank 0's; start all ranks of a launch"));
  }
  EXPECT_THAT(lines.warnings(0), ElementsAre(AllOf(StartsWith("a process at 127.0.0.1:"),
                                                   HasSubstr(" was refused: it says that it is rank 2, and its secret "
                                                             "differs from rank 0's; start all ranks"))));
}

}  // namespace
}  // namespace tandem
