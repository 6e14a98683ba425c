// Steps that end after fewer micro-batches than they may have, and gradients that are not there: what is trained is
// what the caller gave, under every policy.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "core/base/error.hpp"
#include "tests/offload/misuse_message.hpp"
#include "tests/offload/some_absent.hpp"
#include "tests/offload/toy/trainer.hpp"

namespace tandem {
namespace {

using testing::message_of;
using testing::some_absent;
using testing::toy;
using testing::ToyOptions;
using testing::ToyTrainer;
using Says = ToyOptions::Says;

void expect_same_state(ToyTrainer& a, ToyTrainer& b, const char* name) {
  for (const StateArray array : state_arrays) EXPECT_EQ(a.array(name, array), b.array(name, array)) << name;
}

class OpenSteps : public ::testing::TestWithParam<const char*> {};

TEST_P(OpenSteps, HaveTheBitsOfStepsWhoseNumberIsKnown) {
  for (const DType gradient : {DType::f32, DType::bf16}) {
    for (const int micro_batches : {1, 2, 3, 4}) {
      ToyOptions o = toy(GetParam());
      o.gradient = gradient;
      o.uneven = micro_batches > 2;
      o.offload.max_micro_batches = 4;
      o.micro_batches = micro_batches;
      const std::string expected = train_toy(o).digest;
      o.begin = [](StepOptions& options) {
        options.micro_batches = 4;
        options.open_ended = true;
      };
      for (const Says says : {Says::nothing, Says::begin, Says::last}) {
        o.says = says;
        EXPECT_EQ(train_toy(o).digest, expected) << micro_batches;
      }
    }
  }
}

TEST_P(OpenSteps, HaveThoseBitsWhereUpdatesRunInBackward) {
  ToyOptions o = toy(GetParam());
  o.max_grad_norm = 0.0;
  o.offload.on_nonfinite = OnNonfinite::stop;
  o.offload.max_micro_batches = 3;
  o.micro_batches = 2;
  const std::string expected = train_toy(o).digest;
  o.begin = [](StepOptions& options) {
    options.micro_batches = 3;
    options.open_ended = true;
  };
  for (const Says says : {Says::nothing, Says::last}) {
    o.says = says;
    EXPECT_EQ(train_toy(o).digest, expected);
  }
}

/// A layer that is used twice in backward has the gradient of both.
TEST_P(OpenSteps, AddTheGradientsOfALayersTwoUses) {
  for (const int micro_batches : {1, 3}) {
    ToyOptions o = toy(GetParam());
    o.micro_batches = micro_batches;
    o.twice = ToyOptions::Twice::in_one_use;
    const std::string expected = train_toy(o).digest;
    o.twice = ToyOptions::Twice::in_two;
    for (const bool small : {false, true}) {
      if (small && std::string(GetParam()) != "device") {
        o.offload.resident_layers = 0;
        o.offload.prefetch_layers = 1;
      }
      EXPECT_EQ(train_toy(o).digest, expected);
    }
    o.twice = ToyOptions::Twice::no;
    EXPECT_NE(train_toy(o).digest, expected);
  }
}

class AbsentGradients : public ::testing::TestWithParam<const char*> {};

TEST_P(AbsentGradients, CountAsZero) {
  for (const DType gradient : {DType::f32, DType::bf16}) {
    for (const int micro_batches : {1, 2}) {
      ToyOptions o = toy(GetParam());
      o.steps = 4;
      o.gradient = gradient;
      o.micro_batches = micro_batches;
      o.absent = some_absent;
      o.zero_instead = true;
      const std::string expected = train_toy(o).digest;
      o.zero_instead = false;
      o.says = Says::begin;
      o.begin = [](StepOptions& options) { options.absent = Absent::zero; };
      EXPECT_EQ(train_toy(o).digest, expected) << micro_batches;
    }
  }
}

TEST_P(AbsentGradients, LeaveAParameterAsItIsWithItsOwnCountOfUpdates) {
  for (const StateFormat state :
       {StateFormat::fp32, StateFormat::split, StateFormat::bf16_moments, StateFormat::lion}) {
    ToyOptions o = toy(GetParam());
    o.offload.state = state;
    o.offload.seed = 3;
    o.max_grad_norm = 0.0;
    o.gradient = DType::bf16;
    testing::ToyResult ignored;
    ToyTrainer all(o);
    for (const int s : {0, 1, 2}) all.step(s, ignored);
    ToyTrainer fewer(o);
    for (const int s : {0, 2}) fewer.step(s, ignored);
    o.says = Says::begin;
    o.begin = [](StepOptions& options) { options.absent = Absent::skip; };
    o.absent = [](int s, int, const Parameter& p) {
      return s == 1 && (p.full_name.starts_with("h.1.") || p.full_name == "h.2.w");
    };
    ToyTrainer some(o);
    some.step(0, ignored);
    const std::vector<float> before = some.array("h.1.w", StateArray::m);
    some.step(1, ignored);
    EXPECT_EQ(some.array("h.1.w", StateArray::m), before);
    EXPECT_EQ(some.engine().missed_updates(some.layout().parameter("h.1.w")), 1);
    EXPECT_EQ(some.engine().missed_updates(some.layout().parameter("h.2.b")), 0);
    some.step(2, ignored);
    for (const char* name : {"h.1.w", "h.1.b", "h.2.w"}) expect_same_state(some, fewer, name);
    for (const char* name : {"h.0.w", "h.2.b", "h.3.w", "first.table", "last.norm"}) expect_same_state(some, all, name);
    EXPECT_EQ(some.engine().step(), 3);
    // The number of missed updates is part of the state.
    const std::string digest = some.engine().state_digest();
    some.engine().set_step(3);
    EXPECT_NE(some.engine().state_digest(), digest);
  }
}

/// The table's owner in one step, its borrower in another, both in the third: whichever commits, the table is trained.
TEST_P(AbsentGradients, OfOneOfTwoLayersThatShareAParameterLeaveTheOther) {
  ToyOptions o = toy(GetParam());
  o.micro_batches = 2;
  o.max_grad_norm = 0.0;
  o.absent = [](int s, int micro, const Parameter& p) {
    if (s == 0) return p.full_name.starts_with("first.");
    return s == 1 && micro == 0 ? p.full_name.starts_with("last.") : false;
  };
  o.zero_instead = true;
  ToyTrainer expected(o);
  o.zero_instead = false;
  o.says = Says::begin;
  o.begin = [](StepOptions& options) { options.absent = Absent::skip; };
  ToyTrainer actual(o);
  testing::ToyResult ignored;
  for (int s = 0; s < 3; ++s) {
    expected.step(s, ignored);
    actual.step(s, ignored);
  }
  expect_same_state(actual, expected, "first.table");
  expect_same_state(actual, expected, "last.norm");
  EXPECT_EQ(actual.engine().missed_updates(actual.layout().parameter("first.bias")), 1);
  EXPECT_EQ(actual.engine().missed_updates(actual.layout().parameter("first.table")), 0);
}

ToyOptions with_some_absent(const char* policy) {
  ToyOptions o = toy(policy);
  o.steps = 4;
  o.micro_batches = 2;
  o.offload.max_micro_batches = 3;
  o.absent = some_absent;
  o.says = Says::begin;
  o.begin = [](StepOptions& options) {
    options.micro_batches = 3;
    options.open_ended = true;
    options.absent = Absent::skip;
  };
  return o;
}

TEST_P(AbsentGradients, HaveOneDigest) {
  const ToyOptions o = with_some_absent(GetParam());
  static const std::string first = train_toy(with_some_absent("device")).digest;
  EXPECT_EQ(train_toy(o).digest, first);
}

TEST_P(AbsentGradients, AreResumedToTheBit) {
  const ToyOptions o = with_some_absent(GetParam());
  const std::string expected = train_toy(o).digest;
  const std::filesystem::path folder =
      std::filesystem::path(::testing::TempDir()) / (std::string("absent-") + GetParam());
  std::filesystem::remove_all(folder);
  testing::ToyResult ignored;
  {
    ToyTrainer t(o);
    for (int s = 0; s < 3; ++s) t.step(s, ignored);
    t.engine().save(folder);
  }
  ToyOptions other = with_some_absent("interleave:2");
  ToyTrainer t(other);
  t.engine().load(folder);
  EXPECT_EQ(t.engine().missed_updates(t.layout().parameter("first.bias")), 1);
  t.step(3, ignored);
  EXPECT_EQ(t.engine().state_digest(), expected);
}

TEST_P(AbsentGradients, AStepOfNoneLeavesAllState) {
  ToyTrainer t(toy(GetParam()));
  const std::vector<float> before = t.array("h.1.w", StateArray::master);
  t.engine().begin_step({.absent = Absent::skip});
  const StepReport report = t.engine().end_step();
  EXPECT_EQ(report.step, 1);
  EXPECT_EQ(report.gradient_norm, 0.0);
  EXPECT_EQ(t.array("h.1.w", StateArray::master), before);
  EXPECT_EQ(t.engine().missed_updates(t.layout().parameter("h.1.w")), 1);
}

constexpr const char* policies[] = {"device", "host", "stream", "static:0.5", "interleave:2"};
INSTANTIATE_TEST_SUITE_P(Policies, OpenSteps, ::testing::ValuesIn(policies));
INSTANTIATE_TEST_SUITE_P(Policies, AbsentGradients, ::testing::ValuesIn(policies));

// -- wrong use -------------------------------------------------------------------------------------

TEST(AbsentMisuse, NamesTheLayerThatIsMissing) {
  ToyTrainer t(toy("host"));
  t.begin_step();
  for (int l = t.layout().layer_count() - 1; l >= 0; --l) {
    if (l != 2) t.backward(l, 0, 0);
  }
  const std::string message = message_of([&] { t.engine().end_step(); });
  EXPECT_THAT(message, ::testing::HasSubstr("end_step before"));
  EXPECT_THAT(message, ::testing::HasSubstr("layer h.1 has not in micro-batch 0"));
  t.backward(2, 0, 0);
  EXPECT_EQ(t.engine().end_step().step, 1);
}

TEST(AbsentMisuse, FewerMicroBatchesThanWereBegunWith) {
  ToyOptions o = toy("host");
  o.micro_batches = 3;
  ToyTrainer t(o);
  t.begin_step();
  for (int l = t.layout().layer_count() - 1; l >= 0; --l) t.backward(l, 0, 0);
  EXPECT_THAT(message_of([&] { t.engine().end_gradients(); }), ::testing::HasSubstr("micro-batch 1"));
  t.engine().abort_step();
  t.engine().begin_step({.micro_batches = 3, .absent = Absent::skip});
  t.backward(3, 0, 0);
  EXPECT_THAT(message_of([&] { t.engine().end_gradients(); }), ::testing::HasSubstr("1 of 3 micro-batches"));
  t.engine().abort_step();
}

TEST(AbsentMisuse, MicroBatchesOutOfTurn) {
  ToyOptions o = toy("host");
  o.offload.max_micro_batches = 2;
  ToyTrainer t(o);
  OffloadEngine& engine = t.engine();
  EXPECT_THAT(message_of([&] { engine.begin_micro_batch(); }), ::testing::HasSubstr("without a step"));
  engine.begin_step({.micro_batches = 2, .open_ended = true});
  engine.begin_micro_batch();  // the first, in which nothing has come yet
  t.backward(5, 0, 0);
  EXPECT_THAT(message_of([&] { engine.begin_micro_batch(); }), ::testing::HasSubstr("layer h.3 has not"));
  {
    const GradientsGuard gradients = engine.gradients(4, t.stream());
    EXPECT_THAT(message_of([&] { engine.begin_micro_batch(); }),
                ::testing::HasSubstr("gradients of layer h.3 are held"));
  }
  EXPECT_THAT(message_of([&] { engine.begin_micro_batch(); }), ::testing::HasSubstr("abandoned"));
  engine.abort_step();
  engine.begin_step({.micro_batches = 2, .absent = Absent::zero});
  t.backward(5, 0, 0);
  engine.begin_micro_batch(true);
  t.backward(5, 0, 0);
  EXPECT_THAT(message_of([&] { engine.begin_micro_batch(); }), ::testing::HasSubstr("after the last"));
  engine.end_gradients();
  EXPECT_THAT(message_of([&] { engine.begin_micro_batch(); }), ::testing::HasSubstr("after end_gradients"));
  engine.skip();
}

TEST(AbsentMisuse, WhereNoneMayBeAbsent) {
  ToyOptions o = toy("host");
  o.offload.on_nonfinite = OnNonfinite::stop;
  ToyTrainer t(o);
  OffloadEngine& engine = t.engine();
  EXPECT_THAT(message_of([&] { engine.begin_step({.absent = Absent::skip}); }), ::testing::HasSubstr("decides_at_end"));
  engine.begin_step({.max_grad_norm = 1.0});
  {
    GradientsGuard gradients = engine.gradients(2, t.stream());
    EXPECT_THAT(message_of([&] { gradients.leave_out("w"); }), ::testing::HasSubstr("StepOptions::absent"));
    EXPECT_THAT(message_of([&] { gradients.leave_out("frozen"); }), ::testing::HasSubstr("no trained parameter"));
    EXPECT_THAT(message_of([&] { gradients.leave_out("x"); }), ::testing::HasSubstr("no trained parameter"));
  }
  engine.abort_step();
}

TEST(AbsentMisuse, WhereMicroBatchesPassAtOnce) {
  ToyOptions o = toy("host");
  o.micro_batches = o.at_once = 2;
  ToyTrainer t(o);
  EXPECT_THAT(message_of([&] { t.engine().begin_step({.micro_batches = 2, .open_ended = true}); }),
              ::testing::HasSubstr("micro_batches_at_once"));
  EXPECT_THAT(message_of([&] { t.engine().begin_step({.micro_batches = 2, .absent = Absent::zero}); }),
              ::testing::HasSubstr("micro_batches_at_once"));
}

TEST(AbsentMisuse, NumbersOfMissedUpdates) {
  ToyTrainer t(toy("host"));
  const Parameter& p = t.layout().parameter("h.1.w");
  EXPECT_THAT(message_of([&] { t.engine().set_missed_updates(p, 1); }), ::testing::HasSubstr("the state has 0"));
  t.engine().set_step(5);
  t.engine().set_missed_updates(p, 2);
  EXPECT_EQ(t.engine().missed_updates(p), 2);
  EXPECT_THAT(message_of([&] { t.engine().set_missed_updates(p, -1); }), ::testing::HasSubstr("-1"));
  t.engine().set_step(5);
  EXPECT_EQ(t.engine().missed_updates(p), 0);
}

}  // namespace
}  // namespace tandem
