// Schedules of the learning rate.
#include <gtest/gtest.h>

#include <cmath>
#include <numbers>

#include "train/config/schedule.hpp"

namespace tandem {
namespace {

Schedule schedule(Schedule::Kind kind) { return {kind, 1.0, 0.1, 4, 0, 20}; }

TEST(Schedule, WarmsUpInALineAndReachesThePeak) {
  for (const auto kind :
       {Schedule::Kind::constant, Schedule::Kind::linear, Schedule::Kind::cosine, Schedule::Kind::wsd}) {
    const Schedule s = schedule(kind);
    EXPECT_EQ(s.at(1), 0.25);
    EXPECT_EQ(s.at(3), 0.75);
    EXPECT_EQ(s.at(4), 1.0);
  }
}

TEST(Schedule, EndsAtTheMinimum) {
  for (const auto kind : {Schedule::Kind::linear, Schedule::Kind::cosine, Schedule::Kind::wsd}) {
    const Schedule s = schedule(kind);
    EXPECT_EQ(s.at(20), 0.1);
    EXPECT_EQ(s.at(25), 0.1);
    for (std::int64_t step = 5; step <= 20; ++step) EXPECT_LE(s.at(step), s.at(step - 1));
  }
  EXPECT_EQ(schedule(Schedule::Kind::constant).at(20), 1.0);
}

TEST(Schedule, FollowsItsFormulaBetween) {
  EXPECT_DOUBLE_EQ(schedule(Schedule::Kind::linear).at(12), 0.1 + 0.9 * 0.5);
  EXPECT_DOUBLE_EQ(schedule(Schedule::Kind::cosine).at(8), 0.1 + 0.9 * 0.5 * (1.0 + std::cos(std::numbers::pi / 4)));
  EXPECT_EQ(schedule(Schedule::Kind::wsd).at(18), 1.0);
  EXPECT_DOUBLE_EQ(schedule(Schedule::Kind::wsd).at(19), 0.55);
}

TEST(Schedule, DecaysOverTheStepsAskedFor) {
  Schedule s = schedule(Schedule::Kind::linear);
  s.decay_steps = 8;
  EXPECT_DOUBLE_EQ(s.at(6), 0.55);
  EXPECT_EQ(s.at(8), 0.1);
  EXPECT_EQ(s.at(20), 0.1);
  s = schedule(Schedule::Kind::wsd);
  s.decay_steps = 10;
  EXPECT_EQ(s.at(10), 1.0);
  EXPECT_DOUBLE_EQ(s.at(15), 0.55);
  EXPECT_EQ(s.at(20), 0.1);
}

TEST(Schedule, OneStepTakesTheMinimumOnlyWhereThereIsADecay) {
  EXPECT_EQ((Schedule{Schedule::Kind::constant, 1.0, 0.1, 0, 0, 1}).at(1), 1.0);
  EXPECT_EQ((Schedule{Schedule::Kind::cosine, 1.0, 0.1, 0, 0, 1}).at(1), 0.1);
}

TEST(Schedule, IsReadBackFromItsText) {
  for (const auto kind :
       {Schedule::Kind::constant, Schedule::Kind::linear, Schedule::Kind::cosine, Schedule::Kind::wsd}) {
    const Schedule s{kind, 1.0 / 3.0, 1e-300, 7, 12345678901, 987654321};
    const auto read = Schedule::of_text(s.text());
    ASSERT_TRUE(read) << s.text();
    EXPECT_EQ(read->text(), s.text());
    EXPECT_EQ(read->kind, kind);
    EXPECT_EQ(read->lr, s.lr);
    EXPECT_EQ(read->min_lr, s.min_lr);
    EXPECT_EQ(read->steps, s.steps);
  }
  EXPECT_EQ((Schedule{Schedule::Kind::cosine, 3e-4, 0.1 * 3e-4, 0, 0, 12}.brief()),
            "cosine lr 0.0003 to 3e-05, warm-up 0, decay 0, 12 steps");
  EXPECT_FALSE(Schedule::of_text(""));
  EXPECT_FALSE(Schedule::of_text("steep lr 1 to 0.1, warm-up 0, decay 0, 5 steps"));
}

TEST(Schedule, AgreesWhereTheStepsTakenHadTheSameRates) {
  const Schedule cosine{Schedule::Kind::cosine, 1.0, 0.1, 4, 0, 20};
  Schedule longer = cosine;
  longer.steps = 40;
  EXPECT_TRUE(cosine.agrees_with(longer, 4)) << "warm-up is the same";
  EXPECT_FALSE(cosine.agrees_with(longer, 5));
  Schedule fixed = longer;
  fixed.decay_steps = 20;
  EXPECT_TRUE(cosine.agrees_with(fixed, 20));
  Schedule stays{Schedule::Kind::wsd, 1.0, 0.1, 0, 5, 20}, stays_longer = stays;
  stays_longer.steps = 40;
  EXPECT_TRUE(stays.agrees_with(stays_longer, 15));
  EXPECT_FALSE(stays.agrees_with(stays_longer, 16));
}

}  // namespace
}  // namespace tandem
