// Wrong use is refused with names, and leaves the engine usable.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <span>
#include <string>
#include <utility>
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

TEST(Misuse, StepsMustBePaired) {
  ToyTrainer t(toy("host"));
  EXPECT_NE(message_of([&] { t.engine().end_step(); }), "");
  EXPECT_NE(message_of([&] { t.engine().abort_step(); }), "");
  EXPECT_NE(message_of([&] { (void)t.engine().fetch(0, t.stream()); }), "");
  EXPECT_NE(message_of([&] { (void)t.engine().gradients(0, t.stream()); }), "");
  t.engine().begin_step({});
  EXPECT_NE(message_of([&] { t.engine().begin_step({}); }), "");
  EXPECT_NE(message_of([&] { (void)t.engine().state_digest(); }), "");
  EXPECT_NE(message_of([&] { t.engine().end_step(); }), "");  // no gradients yet
  t.engine().abort_step();
}

TEST(Misuse, MoreMicroBatchesThanPlannedAreRefused) {
  ToyTrainer t(toy("host"));
  EXPECT_NE(message_of([&] { t.engine().begin_step({.micro_batches = 2}); }).find("allows 1 to 1"), std::string::npos);
}

TEST(Misuse, HoldingEveryBufferIsNamed) {
  ToyOptions o = toy("host");
  o.offload.resident_layers = 0;
  o.offload.prefetch_layers = 1;
  ToyTrainer t(o);
  t.engine().begin_step({});
  const WeightsGuard first = t.engine().fetch(1, t.stream());
  WeightsGuard second = t.engine().fetch(2, t.stream());  // the shared layer's class has one to spare
  const std::string text = message_of([&] {
    for (int l = 3; l < 5; ++l) {
      static std::vector<WeightsGuard> held;
      held.clear();
      held.push_back(t.engine().fetch(l, t.stream()));
      (void)t.engine().fetch(l + 1, t.stream());
    }
  });
  EXPECT_NE(text.find("no weight buffer is free for layer h."), std::string::npos) << text;
}

TEST(Misuse, CommittingTwiceOrUnknownNamesThrow) {
  ToyTrainer t(toy("host"));
  t.engine().begin_step({});
  {
    const WeightsGuard weights = t.engine().fetch(1, t.stream());
    EXPECT_NE(message_of([&] { (void)weights["nonsense"]; }).find("nonsense"), std::string::npos);
    GradientsGuard gradients = t.engine().gradients(1, t.stream());
    gradients.commit(t.stream());
    EXPECT_NE(message_of([&] { gradients.commit(t.stream()); }), "");
    EXPECT_NE(message_of([&] { (void)t.engine().gradients(1, t.stream()); }), "");
  }
  t.engine().abort_step();
}

TEST(Misuse, AnEngineThatWasGivenNoStateTrainsAndSavesNothing) {
  const ToyOptions o = toy("interleave:2");
  ToyTrainer t(o);
  const ParameterLayout layout = testing::toy_layout(o);
  OffloadEngine engine(t.device(), layout, o.offload, t.engine().plan());
  std::vector<float> values(2000, 0.5F);
  const Parameter& bias = layout.parameter("first.bias");
  const std::span<float> all = std::span(values).first(static_cast<std::size_t>(bias.count));
  const std::vector<std::function<void()>> calls{[&] { engine.begin_step({}); },
                                                 [&] { (void)engine.evaluation(); },
                                                 [&] { (void)engine.state_digest(); },
                                                 [&] { (void)engine.begin_save(); },
                                                 [&] { engine.read(bias, StateArray::master, all); },
                                                 [&] { engine.adopt(t.engine().plan()); }};
  for (const auto& call : calls) EXPECT_EQ(message_of(call).find("the engine has no state yet"), 0);
  engine.write(bias, StateArray::master, all);
  for (const auto& call : calls) EXPECT_EQ(message_of(call).find("the engine has no state yet"), 0);
  engine.initialize([](const Parameter&, std::span<float> master) { std::ranges::fill(master, 0.5F); });
  engine.begin_step({});
  engine.abort_step();
}

TEST(Misuse, OptionsOtherThanThoseOfThePlanAreRefused) {
  const ToyOptions o = toy("host");
  ToyTrainer t(o);
  const ParameterLayout layout = testing::toy_layout(o);
  const auto message_with = [&](const auto& change) {
    OffloadOptions options = o.offload;
    change(options);
    return message_of([&] { OffloadEngine(t.device(), layout, options, t.engine().plan()); });
  };
  EXPECT_EQ(message_with([](OffloadOptions& changed) { changed.state = StateFormat::split; }),
            "the plan was made with other options: it is for fp32 state and 1 micro-batches, the options have split "
            "state and 1 micro-batches; give the engine those that the plan was made with");
  EXPECT_NE(message_with([](OffloadOptions& changed) { changed.max_micro_batches = 2; }), "");
  // Bias correction would divide by zero.
  OffloadOptions without_end = o.offload;
  without_end.adamw.beta1 = 1.0;
  EXPECT_THROW(OffloadEngine(t.device(), layout, without_end, t.engine().plan()), UsageError);
}

TEST(Misuse, APlanOfAnotherLayoutIsRefused) {
  ToyOptions o = toy("host");
  ToyTrainer t(o);
  o.layers = 5;
  const ParameterLayout other = testing::toy_layout(o);
  EXPECT_THROW(OffloadEngine(t.device(), other, o.offload, t.engine().plan()), MisuseError);
}

TEST(Misuse, APlanOfALayoutWithAsMuchStateElsewhereIsRefused) {
  const auto layout_of = [](const std::vector<std::int64_t>& counts, int frozen, bool tied) {
    ParameterLayout layout;
    for (std::size_t i = 0; i < counts.size(); ++i) {
      layout.add_layer("h." + std::to_string(i))
          .add("w", {counts[i]})
          .add("b", {1024}, {.trainable = static_cast<int>(i) != frozen});
    }
    if (tied) layout.tie("h.0.b", "h.2.b");
    return layout;
  };
  const auto toy_device = testing::make_toy_device({});
  Device& device = toy_device->device();
  const PlanningFacts facts{device.info().capacity, 0};
  const ParameterLayout layout = layout_of({1024, 4096, 2048}, -1, false);
  for (const char* policy : {"device", "host", "interleave:2", "stream"}) {
    const OffloadOptions options = toy(policy).offload;
    OffloadEngine engine(device, layout, options, make_plan(layout, options, facts));
    engine.initialize([](const Parameter&, std::span<float> values) { std::fill(values.begin(), values.end(), 0.5F); });
    const std::string digest = engine.state_digest();
    for (const ParameterLayout& other :
         {layout_of({4096, 1024, 2048}, -1, false), layout_of({1024, 4096, 3072}, 2, false),
          layout_of({1024, 4096, 2048}, -1, true)}) {
      const Plan plan = make_plan(other, options, facts);
      EXPECT_THROW(OffloadEngine(device, layout, options, plan), MisuseError);
      EXPECT_THROW(engine.adopt(plan), MisuseError);
    }
    EXPECT_EQ(engine.state_digest(), digest);
  }
}

TEST(Misuse, NamesThatNoCheckpointCouldHoldAreRefused) {
  ParameterLayout layout;
  EXPECT_THROW(layout.add_layer("caf\xe9"), MisuseError);
  EXPECT_THROW(layout.add_layer("h").add("\xff", {3}), MisuseError);
  EXPECT_NO_THROW(layout.add_layer("caf\xc3\xa9").add("w", {3}));
}

TEST(Misuse, NumbersOutOfTheirRangeAreNoPlan) {
  const auto refused = [](const std::function<void(OffloadOptions&)>& change) {
    OffloadOptions options = toy("host").offload;
    change(options);
    EXPECT_THROW((void)make_plan(testing::toy_layout({}), options, PlanningFacts{std::size_t{1} << 30, 0}), UsageError);
  };
  const double nan = std::nan("");
  for (const std::int64_t stride : {0, -3}) {
    refused([stride](OffloadOptions& o) { o.policy = {.kind = Policy::Kind::interleave, .stride = stride}; });
  }
  for (const double share : {-0.5, 2.0, nan}) {
    refused([share](OffloadOptions& o) { o.policy = {.kind = Policy::Kind::static_share, .host_share = share}; });
    refused([share](OffloadOptions& o) { o.policy = {.kind = Policy::Kind::interleave, .resident_share = share}; });
  }
  for (const double beta : {-0.1, 1.0, nan}) {
    refused([beta](OffloadOptions& o) { o.adamw.beta1 = beta; });
    refused([beta](OffloadOptions& o) { o.adamw.beta2 = beta; });
  }
  for (const double value : {-1.0, nan}) {
    refused([value](OffloadOptions& o) { o.adamw.eps = value; });
    refused([value](OffloadOptions& o) { o.adamw.weight_decay = value; });
  }
  // The update has eps in fp32, where the last two are zero and infinite.
  for (const double value : {0.0, 1e-46, 1e300}) refused([value](OffloadOptions& o) { o.adamw.eps = value; });
  refused([](OffloadOptions& o) { o.adamw.weight_decay = 1e300; });
}

TEST(Misuse, ACeilingBeyondTheDeviceIsTheDevices) {
  OffloadOptions options = toy("auto").offload;
  const ParameterLayout layout = testing::toy_layout({});
  const std::size_t capacity =
      make_plan(layout, toy("host").offload, PlanningFacts{std::size_t{1} << 30, 0}).memory.device_bytes();
  options.device_memory = std::size_t{1} << 30;
  EXPECT_LE(make_plan(layout, options, PlanningFacts{capacity, 0}).memory.device_bytes(), capacity);
}

TEST(Abort, LeavesAllStateAsItWas) {
  for (const char* policy : {"device", "host", "interleave:2", "stream"}) {
    ToyTrainer t(toy(policy));
    ToyResult result;
    t.step(0, result);
    const std::string before = t.engine().state_digest();
    t.engine().begin_step({});
    for (int l = 0; l < t.layout().layer_count(); ++l) t.forward(l);
    for (int l = t.layout().layer_count() - 1; l >= 2; --l) t.backward(l, 1, 0);
    t.engine().abort_step();
    EXPECT_EQ(t.engine().state_digest(), before);
    // The next step is what it would have been.
    t.step(1, result);
    ToyTrainer straight(toy(policy));
    ToyResult expected;
    straight.step(0, expected);
    straight.step(1, expected);
    EXPECT_EQ(t.engine().state_digest(), straight.engine().state_digest());
  }
}

TEST(Abort, AnExceptionInsideAStepAbandonsIt) {
  ToyTrainer t(toy("interleave:2"));
  ToyResult result;
  t.step(0, result);
  const std::string before = t.engine().state_digest();
  EXPECT_THROW(
      {
        t.engine().begin_step({});
        for (int l = 0; l < t.layout().layer_count(); ++l) t.forward(l);
        const GradientsGuard gradients = t.engine().gradients(2, t.stream());
        throw std::runtime_error("the caller's own");
      },
      std::runtime_error);
  EXPECT_EQ(t.engine().state_digest(), before);
  t.step(1, result);  // begins as if nothing had happened
  EXPECT_EQ(t.engine().step(), 2);
  ToyTrainer straight(toy("interleave:2"));
  straight.step(0, result);
  straight.step(1, result);
  EXPECT_EQ(t.engine().state_digest(), straight.engine().state_digest());
}

TEST(Stop, ANonFiniteNormEndsTheRunWithItsStateWhole) {
  ToyOptions o = toy("interleave:2");
  o.offload.on_nonfinite = OnNonfinite::stop;  // with clipping: updates wait for the norm
  o.nan_at_step = 1;
  ToyTrainer t(o);
  ToyResult result;
  t.step(0, result);
  const std::string before = t.engine().state_digest();
  EXPECT_THROW(t.step(1, result), TrainingError);
  EXPECT_EQ(t.engine().state_digest(), before);
}

TEST(Stop, AStateUpdatedInPartIsNeitherReadNorTrained) {
  ToyOptions o = toy("interleave:2");
  o.offload.on_nonfinite = OnNonfinite::stop;
  o.max_grad_norm = 0.0;
  o.nan_at_step = 1;
  ToyTrainer t(o);
  ToyResult result;
  t.step(0, result);
  EXPECT_THROW(t.step(1, result), TrainingError);
  const Parameter& p = *t.layout().owned_parameters().front();
  std::vector<float> values(static_cast<std::size_t>(p.count));
  EXPECT_THROW(t.engine().state_digest(), TrainingError);
  EXPECT_THROW(t.engine().read(p, StateArray::master, values), TrainingError);
  EXPECT_THROW(t.engine().begin_step({}), TrainingError);
}

TEST(Stop, AStepAbandonedWhileItUpdatesLeavesNoStateToRead) {
  ToyOptions o = toy("host");
  o.offload.on_nonfinite = OnNonfinite::stop;
  ToyTrainer t(o);
  t.engine().begin_step({});
  for (int l = 0; l < t.layout().layer_count(); ++l) t.forward(l);
  for (int l = t.layout().layer_count() - 1; l >= 2; --l) t.backward(l, 1, 0);
  t.engine().abort_step();
  EXPECT_THROW(t.engine().state_digest(), TrainingError);
}

TEST(State, MadeInPartItIsNeitherReadNorTrained) {
  ToyTrainer t(toy("interleave:2"));
  const std::string expected = t.engine().state_digest();
  int asked = 0;
  const auto gives_up = [&](const Parameter&, std::span<float>) {
    if (++asked == 3) throw InputError("no more values");
  };
  EXPECT_THROW(t.engine().initialize(gives_up), InputError);
  EXPECT_THROW(t.engine().state_digest(), TrainingError);
  EXPECT_THROW(t.engine().begin_step({.lr = 1e-3}), TrainingError);
  t.engine().initialize([](const Parameter&, std::span<float>) {});
  EXPECT_NE(t.engine().state_digest(), expected);
}

TEST(State, WhatIsWrittenIsReadBack) {
  for (const char* policy : {"device", "host", "interleave:2,resident=0.5"}) {
    ToyOptions o = toy(policy);
    o.offload.subgroup_size = 1024;
    ToyTrainer t(o);
    for (const Parameter* p : t.layout().owned_parameters()) {
      if (!p->options.trainable) continue;
      for (const StateArray array : {StateArray::master, StateArray::m, StateArray::v}) {
        std::vector<float> values(static_cast<std::size_t>(p->count));
        for (std::size_t i = 0; i < values.size(); ++i) values[i] = testing::noise(3, i);
        t.engine().write(*p, array, values);
        std::vector<float> back(values.size());
        t.engine().read(*p, array, back);
        EXPECT_EQ(back, values);
      }
    }
  }
}

TEST(State, PiecesWrittenAreTheWhole) {
  // The weights that a master sets are seen by the steps that follow.
  for (const char* policy : {"device", "host", "interleave:2,resident=0.5"}) {
    for (const StateFormat state : {StateFormat::fp32, StateFormat::split}) {
      std::vector<std::string> digests;
      for (const std::size_t piece : {std::size_t{22}, std::size_t{1021}, std::size_t{1} << 20}) {
        ToyOptions o = toy(policy);
        o.offload.subgroup_size = 1024;
        o.offload.state = state;
        ToyTrainer t(o);
        for (const Parameter* p : t.layout().owned_parameters()) {
          for (const StateArray array : {StateArray::v, StateArray::master, StateArray::m}) {
            std::vector<float> values(static_cast<std::size_t>(p->count));
            for (std::size_t i = 0; i < values.size(); ++i) values[i] = 0.1F * std::abs(testing::noise(3, i));
            for (std::size_t first = 0; first < values.size(); first += piece) {
              t.engine().write(*p, array, static_cast<std::int64_t>(first),
                               std::span(values).subspan(first, std::min(piece, values.size() - first)));
            }
          }
        }
        digests.push_back(t.run().digest);
      }
      EXPECT_THAT(digests, ::testing::Each(digests.front())) << policy;
    }
  }
}

TEST(State, PiecesBeyondTheParameterAreRefused) {
  ToyTrainer t(toy("host"));
  const Parameter& p = *t.layout().owned_parameters().front();
  std::vector<float> values(static_cast<std::size_t>(p.count) + 1);
  const std::span<float> too_few = std::span(values).first(values.size() - 2);
  EXPECT_THROW(t.engine().write(p, StateArray::m, too_few), MisuseError) << "all of them or none";
  EXPECT_THROW(t.engine().read(p, StateArray::m, too_few), MisuseError);
  EXPECT_THROW(t.engine().read(p, StateArray::m, values), MisuseError);
  EXPECT_THROW(t.engine().write(p, StateArray::m, values), MisuseError);
  EXPECT_THROW(t.engine().write(p, StateArray::m, 0, values), MisuseError);
  EXPECT_THROW(t.engine().write(p, StateArray::m, -1, std::span(values).first(1)), MisuseError);
  EXPECT_THROW(t.engine().write(p, StateArray::m, p.count, std::span(values).first(1)), MisuseError);
}

TEST(State, InitialValuesAreAskedForInPiecesThatCoverEachParameterInOrder) {
  // One parameter is longer than a piece; the values are those of the whole.
  const auto toy_device = testing::make_toy_device({.capacity = std::size_t{256} << 20});
  Device& device = toy_device->device();
  ParameterLayout layout;
  layout.add_layer("l").add("long", {(std::int64_t{1} << 20) + 55}).add("short", {22});
  OffloadOptions options;
  const Plan plan = make_plan(layout, options, PlanningFacts{device.info().capacity, 0});
  OffloadEngine whole(device, layout, options, plan);
  whole.initialize([](const Parameter&, std::span<float> values) {
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = testing::noise(5, i);
  });
  const std::string digest = whole.state_digest();
  std::vector<std::pair<std::int64_t, std::size_t>> asked;
  whole.initialize([&](const Parameter&, std::int64_t first, std::span<float> values) {
    asked.emplace_back(first, values.size());
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = testing::noise(5, static_cast<std::size_t>(first) + i);
  });
  EXPECT_EQ(whole.state_digest(), digest);
  const std::vector<std::pair<std::int64_t, std::size_t>> expected{{0, 1 << 20}, {1 << 20, 55}, {0, 22}};
  EXPECT_EQ(asked, expected);
}

TEST(State, FrozenParametersNeitherDecayNorMove) {
  ToyTrainer t(toy("interleave:2"));
  const Parameter& frozen = t.layout().parameter("h.1.frozen");
  std::vector<float> before(5);
  std::vector<float> after(5);
  t.engine().read(frozen, StateArray::master, before);
  ToyResult result;
  t.step(0, result);
  t.engine().read(frozen, StateArray::master, after);
  EXPECT_EQ(before, after);
}

}  // namespace
}  // namespace tandem
