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
#include "tests/offload/toy/trainer.hpp"

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

TEST(Guards, OnesThatAreHeldAreEmptyOnceTheStepIsAborted) {
  for (const char* policy : {"host", "interleave:2", "device"}) {
    ToyTrainer t(toy(policy));
    ToyResult result;
    t.step(0, result);
    const auto fails_inside = [&] {
      t.engine().begin_step({});
      const WeightsGuard weights = t.engine().fetch(1, t.stream());
      GradientsGuard gradients = t.engine().gradients(4, t.stream());
      try {
        throw std::runtime_error("the caller's own");
      } catch (...) {
        t.engine().abort_step();  // while both are in scope
        EXPECT_THROW((void)weights["w"], MisuseError);
        EXPECT_THROW((void)gradients["w"], MisuseError);
        EXPECT_THROW(gradients.commit(t.stream()), MisuseError);
        throw;
      }
    };
    EXPECT_THROW(fails_inside(), std::runtime_error);
    t.step(1, result);
    EXPECT_EQ(t.engine().state_digest(), digest_of(toy(policy), 2));
  }
}

TEST(Guards, KeepTheirStreams) {
  ToyOptions o = toy("host");
  ToyTrainer t(o);
  t.engine().begin_step({});
  {
    std::optional<Stream> first = t.device().make_stream("first"), second = t.device().make_stream("second");
    WeightsGuard weights = t.engine().fetch(1, *first);
    weights.also_used_on(*second);
    const GradientsGuard gradients = t.engine().gradients(4, *first);
    first.reset();
    second.reset();
    EXPECT_EQ(weights["w"].count(), t.layout().parameter("h.0.w").count);
  }
  t.engine().abort_step();
  EXPECT_EQ(t.engine().state_digest(), digest_of(o, 0));
}

TEST(Guards, NamesOfThoseThatHoldAllBuffers) {
  ToyOptions o = toy("host");
  o.offload.resident_layers = 0;
  o.offload.prefetch_layers = 1;
  ToyTrainer t(o);
  t.engine().begin_step({});
  {
    std::vector<WeightsGuard> held;
    std::string message;
    try {
      for (int l = 1; l < 5; ++l) held.push_back(t.engine().fetch(l, t.stream()));
    } catch (const MisuseError& error) {
      message = error.what();
    }
    EXPECT_NE(message.find("no weight buffer is free for layer h."), std::string::npos) << message;
    EXPECT_NE(message.find("guards hold h."), std::string::npos) << message;
    EXPECT_NE(message.find("h.0"), std::string::npos) << message;
  }
  t.engine().abort_step();
}

/// A value of a view's memory as the device has it, behind all that is queued on the trainer's stream.
bf16 value_of(ToyTrainer& t, TensorView view) {
  bf16 value{};
  t.toy_device().enqueue(t.stream(), "value", view, {}, [&value](const bf16* values, void*) { value = values[0]; });
  t.device().synchronize(t.stream());
  return value;
}

TEST(Guards, AViewThatOutlivesOneIsSeenWherePoisonIsAskedFor) {
  for (const char* policy : {"host", "interleave:2"}) {
    ToyOptions o = toy(policy);
    o.offload.resident_layers = 0;
    const std::string expected = digest_of(o, 2);
    o.offload.poison_released = true;
    EXPECT_EQ(digest_of(o, 2), expected);
    ToyTrainer t(o);
    const auto scope = t.engine().evaluation();
    TensorView stale;
    {
      const WeightsGuard one = t.engine().fetch(1, t.stream());
      const WeightsGuard two = t.engine().fetch(1, t.stream());
      stale = one["w"];
    }
    EXPECT_TRUE(std::isnan(numerics::bf16_to_float(value_of(t, stale))));
    const WeightsGuard again = t.engine().fetch(1, t.stream());
    { const WeightsGuard other = t.engine().fetch(1, t.stream()); }
    EXPECT_FALSE(std::isnan(numerics::bf16_to_float(value_of(t, again["w"]))));  // still held
  }
}

TEST(ResidentWeights, HaveOneAddressAndTheLastUpdate) {
  for (const char* policy : {"device", "host", "static:0.5"}) {
    ToyOptions o = toy(policy);
    if (std::string(policy) != "device") o.offload.resident_layers = o.layers + 2;
    ToyTrainer t(o);
    ToyResult result;
    const Parameter& p = t.layout().parameter("h.1.w");
    const TensorView view = t.engine().resident_weights(p);
    for (int step = 0; step < 3; ++step) {
      t.step(step, result);
      t.engine().wait_for_weights(p.layer, t.stream());
      const bf16 seen = value_of(t, view);
      std::vector<float> master(static_cast<std::size_t>(p.count));
      t.engine().read(p, StateArray::master, master);
      EXPECT_EQ(seen.bits, numerics::weight_of_master(master[0]).bits) << policy;
      EXPECT_EQ(t.engine().resident_weights(p).data, view.data);
    }
    EXPECT_EQ(t.engine().state_digest(), digest_of(o, 3));
  }
}

TEST(ResidentWeights, AreNotThoseOfALayerThatIsStreamed) {
  ToyOptions o = toy("host");
  o.offload.resident_layers = 0;
  ToyTrainer t(o);
  const Parameter& p = t.layout().parameter("h.1.w");
  EXPECT_THROW((void)t.engine().resident_weights(p), MisuseError);
  EXPECT_THROW(t.engine().wait_for_weights(p.layer, t.stream()), MisuseError);
  EXPECT_THROW(t.engine().wait_for_weights(99, t.stream()), MisuseError);
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
