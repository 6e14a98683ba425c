// Steps whose gradients the caller decides about: the bits are those of the values that `update` was given.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "core/base/error.hpp"
#include "tests/offload/misuse_message.hpp"
#include "tests/offload/toy/trainer.hpp"

namespace tandem {
namespace {

using testing::message_of;
using testing::toy;
using testing::ToyOptions;
using testing::ToyResult;
using testing::ToyTrainer;

constexpr double lr = 1e-2, norm_limit = 1.0;
const AdamW other_adamw{.beta1 = 0.8, .beta2 = 0.99, .eps = 1e-6, .weight_decay = 0.02};

/// Clips as end_step does, from the norm alone.
StepReport clipped(OffloadEngine& engine) {
  const double norm = engine.end_gradients();
  if (!std::isfinite(norm)) return engine.skip();
  return engine.update({.scale = norm > norm_limit ? norm_limit / norm : 1.0, .lr = lr});
}

/// A step up to its end.
void compute(ToyTrainer& t) {
  t.begin_step();
  for (int l = 0; l < t.layout().layer_count(); ++l) t.forward(l);
  for (int l = t.layout().layer_count() - 1; l >= 0; --l) t.backward(l, 0, 0);
}

class Decisions : public ::testing::TestWithParam<const char*> {};

TEST_P(Decisions, ClippingByTheCallerHasTheBitsOfEndStep) {
  for (const int micro_batches : {1, 3}) {
    ToyOptions o = toy(GetParam());
    o.micro_batches = micro_batches;
    o.nan_at_step = 1;
    const ToyResult expected = train_toy(o);
    EXPECT_EQ(expected.skipped, 1);
    o.end = clipped;
    const ToyResult actual = train_toy(o);
    EXPECT_EQ(actual.digest, expected.digest);
    EXPECT_EQ(actual.skipped, expected.skipped);
    EXPECT_EQ(actual.counters.skipped_steps, 1U);
  }
}

TEST_P(Decisions, WhatBeginStepExpectedLeavesNoTrace) {
  ToyOptions o = toy(GetParam());
  o.max_grad_norm = 0.0;
  o.begin = [](StepOptions& options) {
    options.lr = 3e-3;
    options.gradient_scale = 0.25;
    options.adamw = other_adamw;
  };
  const ToyResult expected = train_toy(o);
  o.begin = {};  // told of 1e-2 and the options' hyperparameters
  o.end = [](OffloadEngine& engine) {
    engine.end_gradients();
    return engine.update({.scale = 0.25, .lr = 3e-3, .adamw = other_adamw});
  };
  EXPECT_EQ(train_toy(o).digest, expected.digest);
  o.end = {};
  EXPECT_NE(train_toy(o).digest, expected.digest);
}

TEST_P(Decisions, WhereUpdatesRunInBackwardTheyAreByWhatBeginStepWasTold) {
  ToyOptions o = toy(GetParam());
  o.max_grad_norm = 0.0;
  o.offload.on_nonfinite = OnNonfinite::stop;
  o.offload.clips = false;
  const ToyResult expected = train_toy(o);
  o.end = [](OffloadEngine& engine) {
    engine.end_gradients();
    EXPECT_THAT(message_of([&] { engine.update({.lr = 2 * lr}); }), ::testing::HasSubstr("decides_at_end"));
    EXPECT_THAT(message_of([&] { engine.update({.lr = lr, .adamw = other_adamw}); }),
                ::testing::HasSubstr("decides_at_end"));
    EXPECT_THAT(message_of([&] { engine.skip(); }), ::testing::HasSubstr("decides_at_end"));
    return engine.update({.lr = lr});
  };
  EXPECT_EQ(train_toy(o).digest, expected.digest);
  // Steps that are decided at their end may have such a plan, too.
  o.begin = [](StepOptions& options) {
    options.lr = 2 * lr;
    options.decides_at_end = true;
  };
  o.end = [](OffloadEngine& engine) {
    engine.end_gradients();
    return engine.update({.lr = lr});
  };
  EXPECT_EQ(train_toy(o).digest, expected.digest);
}

void expect_groups_with_their_own_values(ToyOptions o) {
  o.grouped = true;
  o.max_grad_norm = 0.0;
  const auto trained = [&](std::vector<GroupValues> groups) {
    o.end = [groups](OffloadEngine& engine) {
      engine.end_gradients();
      return engine.update({.lr = lr, .groups = groups});
    };
    return train_toy(o).digest;
  };
  AdamW still = o.offload.adamw;
  still.weight_decay = 0.0;
  const GroupValues plain{.lr = lr}, faster{.lr = 4 * lr}, without_decay{.lr = lr, .adamw = still};
  const std::string together = trained({});
  EXPECT_EQ(trained({plain, plain, plain}), together);
  const std::string of_scale = trained({plain, plain, faster}), of_decay = trained({plain, plain, without_decay});
  const std::string of_vectors = trained({plain, {.lr = lr, .adamw = other_adamw}, plain});
  // Groups as begin_step is told of them, where the end is not the caller's.
  o.end = {};
  o.begin = [&](StepOptions& options) { options.groups = {plain, {.lr = lr, .adamw = other_adamw}, plain}; };
  EXPECT_EQ(train_toy(o).digest, of_vectors);
  EXPECT_NE(of_vectors, together);
  o.begin = {};
  // Options of the parameters have the same bits.
  o.lr_scale = 4.0;
  EXPECT_EQ(train_toy(o).digest, of_scale);
  EXPECT_NE(of_scale, together);
  o.lr_scale = 1.0;
  o.decays = false;
  EXPECT_EQ(train_toy(o).digest, of_decay);
  EXPECT_NE(of_decay, together);
}

TEST_P(Decisions, GroupsHaveTheirOwnValues) { expect_groups_with_their_own_values(toy(GetParam())); }

TEST_P(Decisions, GroupsOfLionHaveTheirOwnValues) {
  ToyOptions o = toy(GetParam());
  o.offload.state = StateFormat::lion;
  expect_groups_with_their_own_values(o);
}

TEST_P(Decisions, ASkippedOrAbandonedStepLeavesNoTrace) {
  ToyTrainer t(toy(GetParam()));
  compute(t);
  t.engine().end_step();
  const std::string before = t.engine().state_digest();
  compute(t);
  const double norm = t.engine().end_gradients();
  const StepReport skipped = t.engine().skip();
  EXPECT_TRUE(skipped.skipped);
  EXPECT_EQ(skipped.step, 1);
  EXPECT_EQ(skipped.gradient_norm, norm);
  EXPECT_EQ(t.engine().state_digest(), before);
  compute(t);
  t.engine().end_gradients();
  t.engine().abort_step();
  EXPECT_EQ(t.engine().state_digest(), before);
  EXPECT_EQ(t.engine().counters().skipped_steps, 1U);
}

INSTANTIATE_TEST_SUITE_P(Policies, Decisions,
                         ::testing::Values("device", "host", "stream", "static:0.3", "interleave:2,resident=0.4"));

TEST(Decisions, CallsOutOfOrderAreRefusedAndChangeNothing) {
  ToyTrainer t(toy("host"));
  EXPECT_THAT(message_of([&] { t.engine().end_gradients(); }), ::testing::HasSubstr("end_gradients without a step"));
  EXPECT_THAT(message_of([&] { t.engine().update({}); }), ::testing::HasSubstr("update before end_gradients"));
  EXPECT_THAT(message_of([&] { t.engine().skip(); }), ::testing::HasSubstr("skip before end_gradients"));
  t.begin_step();
  EXPECT_THAT(message_of([&] { t.engine().end_gradients(); }), ::testing::HasSubstr("every layer"));
  EXPECT_THAT(message_of([&] { t.engine().update({}); }), ::testing::HasSubstr("update before end_gradients"));
  t.engine().abort_step();
  compute(t);
  t.engine().end_gradients();
  EXPECT_THAT(message_of([&] { t.engine().end_gradients(); }), ::testing::HasSubstr("after end_gradients"));
  EXPECT_THAT(message_of([&] { t.engine().end_step(); }), ::testing::HasSubstr("end_step after end_gradients"));
  EXPECT_THAT(message_of([&] { (void)t.engine().fetch(0, t.stream()); }), ::testing::HasSubstr("fetch of layer 0"));
  EXPECT_THAT(message_of([&] { (void)t.engine().gradients(1, t.stream()); }),
              ::testing::HasSubstr("gradients of layer 1 after end_gradients"));
  EXPECT_THAT(message_of([&] { t.engine().begin_step({}); }), ::testing::HasSubstr("inside a step"));
  for (const UpdateValues& wrong :
       {UpdateValues{.lr = NAN}, {.scale = INFINITY}, {.adamw = AdamW{.beta1 = 1.0}}, {.adamw = AdamW{.eps = 0.0}}}) {
    EXPECT_NE(message_of([&] { t.engine().update(wrong); }), "");
  }
  EXPECT_THAT(message_of([&] {
                t.engine().update({.groups = {{.lr = lr}, {.lr = lr}}});
              }),
              ::testing::HasSubstr("values of 2 groups"));
  const StepReport report = t.engine().update({.lr = lr});
  EXPECT_EQ(report.step, 1);
  EXPECT_THAT(message_of([&] { t.engine().update({.lr = lr}); }), ::testing::HasSubstr("update before end_gradients"));
  EXPECT_EQ(t.engine().step(), 1);
}

TEST(Decisions, GradientsThatAreNotFiniteAreNotForUpdates) {
  ToyOptions o = toy("interleave:2");
  o.nan_at_step = 0;
  o.steps = 1;
  o.end = [](OffloadEngine& engine) {
    EXPECT_TRUE(std::isnan(engine.end_gradients()));
    EXPECT_THAT(message_of([&] { engine.update({.lr = lr}); }), ::testing::HasSubstr("call skip"));
    return engine.skip();
  };
  const ToyResult skipped = train_toy(o);
  o.steps = 0;
  EXPECT_EQ(skipped.digest, train_toy(o).digest);
}

}  // namespace
}  // namespace tandem
