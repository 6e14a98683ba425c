// Direct preference optimization against TRL's formula by PyTorch in fp32: losses, rewards, every gradient, and ten
// steps.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "tests/models/gradient_distance.hpp"
#include "tests/models/rig.hpp"

namespace tandem::testing {
namespace {

constexpr double gradient_bar = 1e-5;
constexpr double pair_bar = 1e-5;       // for losses and rewards around 1, made of sums of some 40
constexpr double pair_step_bar = 3e-4;  // margins grow to 1 and 4, and are made of some 40 losses, each within 1e-4

/// Pairs of one step, or of several.
struct PairBatch {
  std::vector<std::int32_t> tokens, targets;
  std::vector<float> reference;
  PairBatch part(std::size_t i, std::size_t count) const {
    const auto of = [&](const auto& values) {
      const std::size_t each = values.size() / count;
      const auto begin = values.begin() + static_cast<std::ptrdiff_t>(i * each);
      return std::decay_t<decltype(values)>(begin, begin + static_cast<std::ptrdiff_t>(each));
    };
    return {of(tokens), of(targets), of(reference)};
  }
};

PairBatch batch_of(const Fixture& fixture, const std::string& prefix = {}) {
  return {fixture[prefix + "tokens"].as<std::int32_t>(), fixture[prefix + "targets"].as<std::int32_t>(),
          fixture[prefix + "reference"].floats()};
}

RunShape shape_of_pairs(const Fixture& fixture, bool recompute = false) {
  RunShape shape = shape_of(fixture, recompute);
  shape.preference_beta = fixture.beta();
  return shape;
}

void set(Rig& rig, const PairBatch& batch, std::int64_t micro = 0) {
  rig.set_batch(batch.tokens, batch.targets, micro);
  rig.set_reference(batch.reference, micro);
}

class Preferences : public ::testing::TestWithParam<std::string> {
 protected:
  Fixture fixture{GetParam()};
};

TEST_P(Preferences, LossesRewardsAndEveryGradientAgreeWithPyTorch) {
  Rig rig(fixture, shape_of_pairs(fixture));
  set(rig, batch_of(fixture));
  rig.train(fixture.gradient_scale());
  const std::vector<float> pairs = rig.pairs(), expected = fixture["pairs"].floats();
  ASSERT_EQ(pairs.size(), 6U);
  for (std::size_t i = 0; i < pairs.size(); ++i) EXPECT_NEAR(pairs[i], expected[i], pair_bar) << i;
  const Gradients ours = rig.gradients();
  EXPECT_EQ(ours.size(), fixture.gradient_count());
  const Distance d = distance(ours, expected_gradients(fixture));
  EXPECT_LE(d.worst, gradient_bar) << d.parameter;
}

TEST_P(Preferences, EvaluationGivesTheSamePairs) {
  Rig rig(fixture, shape_of_pairs(fixture, true));
  set(rig, batch_of(fixture));
  const std::vector<float> losses = rig.train(fixture.gradient_scale());
  const std::vector<float> pairs = rig.pairs();
  EXPECT_EQ(rig.evaluate(), losses);
  EXPECT_EQ(rig.pairs(), pairs);
}

// The reference of a model by itself: nothing has been learnt, to the bit.
TEST_P(Preferences, AModelThatIsItsReferenceHasTheLossOfACoin) {
  Rig rig(fixture, shape_of_pairs(fixture));
  PairBatch batch = batch_of(fixture);
  set(rig, batch);
  const std::vector<float> losses = rig.evaluate();
  const std::size_t length = losses.size() / batch.reference.size();
  for (std::size_t i = 0; i < batch.reference.size(); ++i) {
    double sum = 0.0;
    for (std::size_t t = 0; t < length; ++t) sum += static_cast<double>(losses[i * length + t]);
    batch.reference[i] = -static_cast<float>(sum);
  }
  set(rig, batch);
  rig.train(fixture.gradient_scale());
  const auto coin = static_cast<float>(std::log(2.0));
  EXPECT_EQ(rig.pairs(), (std::vector<float>{coin, 0.0F, 0.0F, coin, 0.0F, 0.0F}));
}

// With several at once a tied table is made last, from inputs and factors that were kept.
TEST_P(Preferences, MicroBatchesAtOnceHaveTheBitsOfEach) {
  RunShape shape = shape_of_pairs(fixture);
  const PairBatch first = batch_of(fixture, "trajectory.").part(0, 10), second = batch_of(fixture);
  std::vector<Gradients> alone;
  for (const PairBatch& batch : {first, second}) {
    Rig rig(fixture, shape);
    set(rig, batch);
    rig.train(0.5F);
    alone.push_back(rig.gradients());
  }
  EXPECT_NE(alone[0], alone[1]);
  shape.micro_batches = 2;
  Rig rig(fixture, shape);
  set(rig, first, 0);
  set(rig, second, 1);
  rig.train(0.5F, 2);
  EXPECT_EQ(rig.gradients(0), alone[0]);
  EXPECT_EQ(rig.gradients(1), alone[1]);
}

/// Largest differences of loss and margin over ten steps, with a fault in the beta.
double off_the_trajectory(const Fixture& fixture, float beta) {
  RunShape shape = shape_of_pairs(fixture);
  shape.preference_beta = beta;
  Rig rig(fixture, shape);
  const FixtureOptimizer& o = fixture.optimizer();
  const AdamW adamw{.beta1 = o.beta1, .beta2 = o.beta2, .eps = o.eps, .weight_decay = o.weight_decay};
  const PairBatch all = batch_of(fixture, "trajectory.");
  const auto losses = fixture["trajectory.losses"].as<double>(), margins = fixture["trajectory.margins"].as<double>();
  double worst = 0.0;
  for (std::size_t i = 0; i < losses.size(); ++i) {
    set(rig, all.part(i, losses.size()));
    rig.train(fixture.gradient_scale());
    const std::vector<float> p = rig.pairs();
    const double loss = (p[0] + p[3]) / 2.0, margin = (p[1] - p[2] + p[4] - p[5]) / 2.0;
    worst = std::max({worst, std::abs(loss - losses[i]), std::abs(margin - margins[i])});
    rig.parameters().step(adamw, o.lr, o.clip);
  }
  return worst;
}

TEST_P(Preferences, TenStepsAgreeWithPyTorch) {
  const double worst = off_the_trajectory(fixture, fixture.beta());
  EXPECT_LT(worst, pair_step_bar);
  RecordProperty("worst", std::to_string(worst * 1e6) + "e-6");
  EXPECT_GT(off_the_trajectory(fixture, 1.01F * fixture.beta()), 10 * pair_step_bar) << "another beta is not seen";
}

INSTANTIATE_TEST_SUITE_P(Models, Preferences, ::testing::ValuesIn(preference_fixture_names()),
                         [](const auto& instance) { return instance.param.substr(instance.param.rfind('/') + 1); });

}  // namespace
}  // namespace tandem::testing
