// Guards and streams in the wrong order, and exceptions between them: told at once, and the engine goes on to the same
// bits.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/base/error.hpp"
#include "tests/offload/toy_trainer.hpp"

namespace tandem {
namespace {

using testing::toy;
using testing::ToyOptions;
using testing::ToyResult;
using testing::ToyTrainer;

std::string digest_of(const ToyOptions& options, int steps) {
  ToyTrainer t(options);
  ToyResult result;
  for (int step = 0; step < steps; ++step) t.step(step, result);
  return t.engine().state_digest();
}

/// A step is opened, `wrong` is done in it, and it is dropped; the steps around it are what they would have been.
void expect_no_trace(const ToyOptions& options, const std::function<void(ToyTrainer&)>& wrong) {
  ToyTrainer t(options);
  ToyResult result;
  t.step(0, result);
  t.engine().begin_step({});
  wrong(t);
  t.engine().abort_step();
  t.step(1, result);
  EXPECT_EQ(t.engine().state_digest(), digest_of(options, 2));
}

TEST(Guards, WhatWaitsForUpdatesIsRefusedWhileOneIsHeld) {
  for (const char* policy : {"host", "stream"}) {
    expect_no_trace(toy(policy), [](ToyTrainer& t) {
      const Parameter& p = *t.layout().owned_parameters().front();
      std::vector<float> values(static_cast<std::size_t>(p.count));
      const WeightsGuard weights = t.engine().fetch(1, t.stream());
      EXPECT_THROW(t.engine().wait(), MisuseError);
      EXPECT_THROW(t.engine().read(p, StateArray::master, values), MisuseError);
      const GradientsGuard gradients = t.engine().gradients(4, t.stream());
      EXPECT_THROW(t.engine().wait(), MisuseError);
    });
  }
}

TEST(Guards, OneThatOutlivesItsEvaluationIsNotWaitedFor) {
  ToyTrainer t(toy("host"));
  std::optional<WeightsGuard> weights;
  {
    const auto scope = t.engine().evaluation();
    weights = t.engine().fetch(1, t.stream());
  }
  EXPECT_THROW((void)t.engine().state_digest(), MisuseError);
  weights.reset();
  EXPECT_EQ(t.engine().state_digest(), digest_of(toy("host"), 0));
}

TEST(Guards, OnesThatOutliveTheEngineAreEmpty) {
  ToyOptions o = toy("stream");
  o.offload.watchdog_seconds = 1e6;  // nobody waits for them
  WeightsGuard weights;
  GradientsGuard gradients;
  {
    ToyTrainer t(o);
    t.engine().begin_step({});
    weights = t.engine().fetch(1, t.stream());
    gradients = t.engine().gradients(4, t.stream());
    t.device().synchronize(t.stream());
  }
  EXPECT_THROW((void)weights["w"], MisuseError);
  EXPECT_THROW((void)gradients["w"], MisuseError);
  EXPECT_THROW(gradients.commit({}), MisuseError);
}

TEST(Guards, StreamsThatAreNoneOfTheDevicesAreRefusedBeforeAnythingIsQueued) {
  const auto other = testing::make_toy_device({});
  Stream foreign = other->device().make_stream("foreign");
  Stream moved_from;
  const Stream moved = std::exchange(moved_from, Stream());
  for (const StreamView stream : {StreamView(), StreamView(moved), StreamView(foreign)}) {
    expect_no_trace(toy("interleave:2"), [stream](ToyTrainer& t) {
      EXPECT_THROW((void)t.engine().fetch(1, stream), MisuseError);
      EXPECT_THROW((void)t.engine().gradients(4, stream), MisuseError);
      WeightsGuard weights = t.engine().fetch(1, t.stream());
      EXPECT_THROW(weights.also_used_on(stream), MisuseError);
      GradientsGuard gradients = t.engine().gradients(4, t.stream());
      EXPECT_THROW(gradients.commit(stream), MisuseError);
    });
  }
}

TEST(Guards, LayersThatShareParametersAreNotFilledOnTwoStreams) {
  expect_no_trace(toy("host"), [](ToyTrainer& t) {
    const Stream second = t.device().make_stream("second");
    const int last = t.layout().layer_count() - 1;
    GradientsGuard gradients = t.engine().gradients(last, t.stream());
    EXPECT_THROW((void)t.engine().gradients(0, second), MisuseError);
    gradients.commit(t.stream());
    (void)t.engine().gradients(0, second);
  });
}

TEST(Exceptions, OneThatPassesAGuardOfWeightsAbandonsTheStep) {
  for (const char* policy : {"host", "interleave:2"}) {
    const ToyOptions o = toy(policy);
    ToyTrainer t(o);
    ToyResult result;
    t.step(0, result);
    EXPECT_THROW(
        {
          t.engine().begin_step({});
          const WeightsGuard weights = t.engine().fetch(1, t.stream());
          throw std::runtime_error("the caller's own");
        },
        std::runtime_error);
    t.step(1, result);
    EXPECT_EQ(t.engine().state_digest(), digest_of(o, 2));
  }
}

TEST(Exceptions, WhatFollowsAnAbandonedStepNeedNotBeAStep) {
  ToyTrainer t(toy("host"));
  ToyResult result;
  t.step(0, result);
  const std::string before = t.engine().state_digest();
  const auto abandon = [&] {
    t.engine().begin_step({});
    (void)t.engine().gradients(4, t.stream());  // and not committed
  };
  abandon();
  EXPECT_EQ(t.engine().state_digest(), before);
  abandon();
  t.evaluate();
  abandon();
  EXPECT_NO_THROW((void)t.engine().begin_save());
}

TEST(Exceptions, AStepThatIsOpenSaysHowItEnds) {
  ToyTrainer t(toy("host"));
  t.engine().begin_step({});
  try {
    t.engine().begin_step({});
    ADD_FAILURE() << "not refused";
  } catch (const MisuseError& error) {
    EXPECT_NE(std::string(error.what()).find("abort_step"), std::string::npos) << error.what();
  }
  t.engine().abort_step();
}

TEST(Numbers, AStepOfNoNumbersIsRefused) {
  constexpr double nan = std::numeric_limits<double>::quiet_NaN(), infinite = std::numeric_limits<double>::infinity();
  const ToyOptions o = toy("host");
  ToyTrainer t(o);
  ToyResult result;
  t.step(0, result);
  const std::vector<StepOptions> wrong{{.lr = nan},           {.lr = infinite},        {.max_grad_norm = nan},
                                       {.max_grad_norm = -1}, {.gradient_scale = nan}, {.gradient_scale = infinite}};
  for (const StepOptions& options : wrong) EXPECT_THROW(t.engine().begin_step(options), MisuseError);
  t.step(1, result);
  EXPECT_EQ(t.engine().state_digest(), digest_of(o, 2));
}

TEST(Numbers, AStateUpdatedInPartIsNotEvaluated) {
  ToyOptions o = toy("host");
  o.offload.on_nonfinite = OnNonfinite::stop;
  o.max_grad_norm = 0.0;
  o.nan_at_step = 0;
  ToyTrainer t(o);
  ToyResult result;
  EXPECT_THROW(t.step(0, result), TrainingError);
  EXPECT_THROW((void)t.engine().evaluation(), TrainingError);
}

}  // namespace
}  // namespace tandem
