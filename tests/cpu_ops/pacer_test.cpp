// The pace of emulated links.
#include "cpu_ops/device/pacer.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "core/base/error.hpp"

namespace tandem {
namespace {

using namespace std::chrono_literals;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

/// Time that passes only by sleeping, and where a test says so.
struct FakeTime {
  PacerClock::Time now{};
  PacerClock::Time::duration oversleeps{};
  std::vector<double> ends;  ///< seconds until which was to be slept
  PacerClock clock() {
    return {[this] { return now; },
            [this](PacerClock::Time until) {
              ends.push_back(std::chrono::duration<double>(until.time_since_epoch()).count());
              now = until + oversleeps;
            }};
  }
};

void nothing() {}

TEST(Pacer, WorkFollowsWork) {
  FakeTime time;
  Pacer pacer("a link", 1000.0, time.clock());
  int works = 0;
  pacer.run(500, [&] { ++works; });
  pacer.run(250, [&] { ++works; });
  EXPECT_THAT(time.ends, ElementsAre(0.5, 0.75)) << "the second waits for the first";
  EXPECT_EQ(works, 2);
}

TEST(Pacer, IdleTimeIsNotSavedUp) {
  FakeTime time;
  Pacer pacer("a link", 1000.0, time.clock());
  pacer.run(500, nothing);
  time.now += 2s;
  pacer.run(1000, nothing);
  EXPECT_THAT(time.ends, ElementsAre(0.5, 3.5));
}

TEST(Pacer, LateWakingsDoNotAddUp) {
  FakeTime time;
  time.oversleeps = 125ms;
  Pacer pacer("a link", 1000.0, time.clock());
  for (int i = 0; i < 4; ++i) pacer.run(500, nothing);
  EXPECT_THAT(time.ends, ElementsAre(0.5, 1.0, 1.5, 2.0)) << "a rate of 1000 over all of them";
  time.now += 2s;  // from 2.125: what was made up for once counts no more than once
  pacer.run(500, nothing);
  pacer.run(500, nothing);
  EXPECT_THAT(time.ends, ElementsAre(0.5, 1.0, 1.5, 2.0, 4.5, 5.0));
}

TEST(Pacer, WorkSlowerThanTheRateTakesItsTimeAndGivesNoCredit) {
  FakeTime time;
  Pacer pacer("a link", 1000.0, time.clock());
  pacer.run(500, [&] { time.now += 2s; });
  EXPECT_THAT(time.ends, IsEmpty()) << "nothing is left to sleep";
  pacer.run(500, nothing);
  EXPECT_THAT(time.ends, ElementsAre(2.5));
}

TEST(Pacer, WithoutARateTakesNoTime) {
  FakeTime time;
  Pacer pacer("a link", 0, time.clock());
  int works = 0;
  pacer.run(1e9, [&] { ++works; });
  EXPECT_EQ(works, 1);
  EXPECT_THAT(time.ends, IsEmpty());
}

TEST(Pacer, RefusesRatesThatAreNone) {
  EXPECT_THROW(Pacer("a link", -1.0), UsageError);
  EXPECT_THROW(Pacer("a link", std::numeric_limits<double>::infinity()), UsageError);
}

}  // namespace
}  // namespace tandem
