// Updates that run before the gradient norm is known leave the bits of updates after it, whatever the norm decides.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "core/base/error.hpp"
#include "offload/engine/speculation_choice.hpp"
#include "tests/offload/toy/trainer.hpp"

namespace tandem {
namespace {

using testing::toy;
using testing::ToyOptions;
using testing::ToyResult;
using testing::ToyTrainer;

constexpr double nothing_is_clipped = 1e9;

ToyOptions speculating(const std::string& policy, StateFormat state = StateFormat::split) {
  ToyOptions o = toy(policy);
  o.offload.speculate = Speculate::on;
  o.offload.state = state;
  o.offload.subgroup_size = 2048;
  o.max_grad_norm = nothing_is_clipped;
  o.steps = 5;
  return o;
}

/// A training with every update after the norm, else the same.
ToyResult waiting(ToyOptions o) {
  o.offload.speculate = Speculate::off;
  return train_toy(o);
}

/// Just below the norm of some steps and above that of others: those are clipped when all but a little of them is
/// updated.
double between(const std::vector<double>& norms) {
  std::vector<double> sorted = norms;
  std::ranges::sort(sorted);
  return 0.5 * (sorted[sorted.size() / 2 - 1] + sorted[sorted.size() / 2]);
}

class Speculation : public ::testing::TestWithParam<const char*> {};

void expect_the_bits_of_waiting(const ToyOptions& o, const std::string& what) {
  const ToyResult expected = waiting(o), actual = train_toy_ahead(o);
  EXPECT_EQ(actual.digest, expected.digest) << what;
  EXPECT_EQ(actual.norms, expected.norms) << what;
  EXPECT_EQ(actual.losses, expected.losses) << what;
  EXPECT_GT(actual.counters.parameters_speculated, 0U) << what;
}

TEST_P(Speculation, GivesTheSameBitsWhateverTheNormDecides) {
  for (const StateFormat state : adamw_formats) {
    ToyOptions o = speculating(GetParam(), state);
    const ToyResult unclipped = train_toy(o);
    EXPECT_EQ(unclipped.counters.parameters_taken_back, 0U);
    expect_the_bits_of_waiting(o, "confirmed");
    o.max_grad_norm = between(unclipped.norms);
    expect_the_bits_of_waiting(o, "some clipped");
    o.max_grad_norm = 0.999 * *std::ranges::min_element(unclipped.norms);
    expect_the_bits_of_waiting(o, "all clipped");
    EXPECT_GT(train_toy_ahead(o).counters.parameters_taken_back, 0U);
  }
}

TEST_P(Speculation, GivesTheSameBitsInEveryOrder) {
  for (const auto& [micro_batches, at_once] : {std::pair{1, 1}, {3, 1}, {3, 3}, {5, 2}}) {
    for (const int resident : {0, 1, 6}) {
      ToyOptions o = speculating(GetParam());
      o.micro_batches = micro_batches;
      o.at_once = at_once;
      o.offload.resident_layers = resident;
      o.evaluate_between = resident == 1;
      o.frozen_ends = resident == 6;
      o.gradient = resident == 0 ? DType::bf16 : DType::f32;
      o.max_grad_norm = between(waiting(o).norms);
      expect_the_bits_of_waiting(o, std::to_string(micro_batches) + " micro-batches, " + std::to_string(resident));
      o.offload.overlap = false;
      expect_the_bits_of_waiting(o, "one task after another");
    }
  }
}

TEST_P(Speculation, GivesTheSameBitsWithGroupsAndFp32Weights) {
  ToyOptions o = speculating(GetParam());
  o.vectors = DType::f32;
  o.grouped = true;
  o.decays = false;
  o.lr_scale = 0.25;
  o.max_grad_norm = between(waiting(o).norms);
  expect_the_bits_of_waiting(o, "groups");
}

/// A subgroup that is slow to update is done ahead while the norm comes in, or not, as it happens.
TEST_P(Speculation, GivesTheSameBitsAtAnyPace) {
  for (const double pace : {2e5, 4e6}) {
    ToyOptions o = speculating(GetParam());
    o.device.update_parameters_per_second = pace;
    o.max_grad_norm = between(waiting(o).norms);
    const ToyResult expected = waiting(o);
    EXPECT_EQ(train_toy(o).digest, expected.digest);
  }
}

TEST_P(Speculation, TakesASkippedStepBack) {
  ToyOptions o = speculating(GetParam());
  o.steps = 2;
  const std::string expected = waiting(o).digest;
  o.nan_at_step = 2;
  const int layers = testing::toy_layout(o).layer_count();
  for (o.nan_layer = 0; o.nan_layer < layers; ++o.nan_layer) {
    ToyTrainer trainer(o);
    ToyResult result;
    for (int s = 0; s < 3; ++s) trainer.step(s, result);
    EXPECT_EQ(result.skipped, 1);
    EXPECT_EQ(trainer.engine().state_digest(), expected) << "layer " << o.nan_layer;
    ToyOptions plain = o;
    plain.offload.speculate = Speculate::off;
    ToyTrainer other(plain);
    ToyResult expected_result;
    for (int s = 0; s < 4; ++s) other.step(s, expected_result);
    trainer.step(3, result);
    EXPECT_EQ(result.losses, expected_result.losses) << "the next forward sees the old weights";
    EXPECT_EQ(trainer.engine().state_digest(), other.engine().state_digest());
  }
}

/// A step up to its end.
void compute(ToyTrainer& t, int s) {
  t.begin_step();
  for (int l = 0; l < t.layout().layer_count(); ++l) t.forward(l);
  for (int l = t.layout().layer_count() - 1; l >= 0; --l) t.backward(l, s, 0);
}

/// The bits of the weights of a layer's largest parameter, as a use gets them.
void look(ToyTrainer& t, int layer, std::vector<std::uint16_t>& seen) {
  const WeightsGuard weights = t.engine().fetch(layer, t.stream());
  const TensorView w = weights[t.layout().layer(layer).parameters.back().name];
  std::vector<std::uint16_t>* const to = &seen;
  t.toy_device().enqueue(t.stream(), "look", w, {}, [w, to](const bf16* values, void*) {
    for (std::int64_t i = 0; i < w.count(); ++i) to->push_back(values[i].bits);
  });
  t.device().synchronize(t.stream());
}

/// Waits until updates have run ahead of the norm, and for a while no more do.
void wait_for_updates(ToyTrainer& t, std::uint64_t earlier) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  for (std::uint64_t before = earlier, now = earlier; now == earlier || now > before;) {
    ASSERT_LT(std::chrono::steady_clock::now(), end) << "no update has run";
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    before = now;
    now = t.engine().counters().parameters_speculated;
  }
}

TEST_P(Speculation, TakesAnAbandonedStepBack) {
  ToyTrainer trainer(speculating(GetParam()));
  ToyResult result;
  for (int s = 0; s < 2; ++s) trainer.step(s, result);
  const std::string before = trainer.engine().state_digest();
  const std::uint64_t earlier = trainer.engine().counters().parameters_speculated;
  compute(trainer, 2);
  wait_for_updates(trainer, earlier);
  trainer.engine().abort_step();
  EXPECT_EQ(trainer.engine().state_digest(), before);
  compute(trainer, 2);
  try {
    const WeightsGuard weights = trainer.engine().fetch(0, trainer.stream());
    throw std::runtime_error("the caller's own");
  } catch (const std::runtime_error&) {
  }
  EXPECT_EQ(trainer.engine().state_digest(), before);
}

TEST_P(Speculation, TakesAStepBackThatStops) {
  ToyOptions o = speculating(GetParam());
  o.offload.on_nonfinite = OnNonfinite::stop;
  o.nan_at_step = 2;
  o.nan_layer = 0;
  ToyTrainer trainer(o);
  ToyResult result;
  for (int s = 0; s < 2; ++s) trainer.step(s, result);
  const std::string before = trainer.engine().state_digest();
  EXPECT_THROW(trainer.step(2, result), TrainingError);
  EXPECT_EQ(trainer.engine().state_digest(), before);
}

TEST_P(Speculation, IsByWhatBeginStepWasTold) {
  ToyOptions o = speculating(GetParam());
  o.begin = [](StepOptions& options) { options.decides_at_end = true; };
  o.end = [](OffloadEngine& engine) {
    engine.end_gradients();
    return engine.update({.scale = 0.25, .lr = 3e-3});
  };
  expect_the_bits_of_waiting(o, "other values at the end");
  o.end = [](OffloadEngine& engine) {
    engine.end_gradients();
    return engine.skip();
  };
  expect_the_bits_of_waiting(o, "skipped");
}

/// Betas whose inverse is no use: the step waits for its norm.
TEST_P(Speculation, LeavesAloneWhatCannotBeTakenBack) {
  ToyOptions o = speculating(GetParam());
  o.offload.adamw.beta1 = 0.3;
  const ToyResult expected = waiting(o), actual = train_toy(o);
  EXPECT_EQ(actual.digest, expected.digest);
  EXPECT_EQ(actual.counters.parameters_speculated, 0U);
  EXPECT_EQ(actual.counters.confirmed_steps, 0U);
}

/// A layer that is used once more, when its update may have run: it shows the weights that forward has seen.
TEST_P(Speculation, ShowsTheOldWeightsWithinAStep) {
  for (const int resident : {0, 1}) {
    ToyOptions o = speculating(GetParam());
    o.offload.resident_layers = resident;
    ToyTrainer trainer(o);
    ToyResult result;
    trainer.step(0, result);
    const std::string before = trainer.engine().state_digest();
    for (const int l : {1, 4}) {
      std::vector<std::vector<std::uint16_t>> seen(2);
      trainer.begin_step();
      for (int i = 0; i < trainer.layout().layer_count(); ++i) trainer.forward(i);
      look(trainer, l, seen[0]);
      const std::uint64_t earlier = trainer.engine().counters().parameters_speculated;
      for (int i = trainer.layout().layer_count() - 1; i >= 0; --i) trainer.backward(i, 1, 0);
      wait_for_updates(trainer, earlier);
      look(trainer, l, seen[1]);
      EXPECT_EQ(seen[1], seen[0]) << "layer " << l;
      trainer.engine().abort_step();
      EXPECT_EQ(trainer.engine().state_digest(), before);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Policies, Speculation, ::testing::Values("host", "static:0.5", "interleave:2"),
                         [](const auto& tested) {
                           std::string name = tested.param;
                           std::ranges::replace_if(
                               name, [](char c) { return !std::isalnum(c); }, '_');
                           return name;
                         });

TEST(SpeculationChoice, FollowsThreeQuartersOfTheLastSteps) {
  SpeculationChoice choice(Speculate::automatic);
  EXPECT_FALSE(choice.speculates()) << "nothing is known yet";
  for (int s = 0; s < 6; ++s) choice.note(true);
  EXPECT_TRUE(choice.speculates());
  for (int s = 0; s < 2; ++s) choice.note(true);
  for (int s = 0; s < 2; ++s) choice.note(false);
  EXPECT_TRUE(choice.speculates());
  choice.note(false);
  EXPECT_FALSE(choice.speculates());
  EXPECT_TRUE(SpeculationChoice(Speculate::on).speculates());
  EXPECT_FALSE(SpeculationChoice(Speculate::off).speculates());
}

}  // namespace
}  // namespace tandem
