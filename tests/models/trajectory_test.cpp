// Twenty steps of training against a plain PyTorch loop of the same rounding: bf16 weights and gradients,
// fp32 master, AdamW, clipping by the global norm.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "tests/models/rig.hpp"

namespace tandem::testing {
namespace {

constexpr double bar = 1e-4;

struct Steps {
  std::vector<double> losses;
  std::vector<double> expected;
  double worst() const {
    double off = 0.0;
    for (std::size_t i = 0; i < expected.size(); ++i) off = std::max(off, std::abs(losses[i] / expected[i] - 1.0));
    return off;
  }
};

/// Factors by which a faulty trainer's settings differ.
struct Fault {
  double lr = 1.0;
  double clip = 1.0;
  double decay = 1.0;
  double beta2 = 1.0;
};

Steps run(const Fixture& fixture, bool recompute, const Fault& fault = {}) {
  Rig rig(fixture, shape_of(fixture, recompute));
  const FixtureOptimizer& o = fixture.optimizer();
  const AdamW adamw{
      .beta1 = o.beta1, .beta2 = o.beta2 * fault.beta2, .eps = o.eps, .weight_decay = o.weight_decay * fault.decay};
  const auto tokens = fixture["trajectory.tokens"].as<std::int32_t>();
  const auto targets = fixture["trajectory.targets"].as<std::int32_t>();
  Steps steps{.losses = {}, .expected = fixture["trajectory.losses"].as<double>()};
  const std::size_t each = tokens.size() / steps.expected.size();
  for (std::size_t i = 0; i < steps.expected.size(); ++i) {
    const std::span batch = std::span(targets).subspan(i * each, each);
    const auto count = static_cast<double>(std::ranges::count_if(batch, [](std::int32_t t) { return t >= 0; }));
    rig.set_batch(std::span(tokens).subspan(i * each, each), batch);
    const std::vector<float> losses = rig.train(static_cast<float>(1.0 / count));
    steps.losses.push_back(std::accumulate(losses.begin(), losses.end(), 0.0) / count);
    rig.parameters().step(adamw, o.lr * fault.lr, o.clip * fault.clip);
  }
  return steps;
}

class Trajectory : public ::testing::TestWithParam<std::string> {
 protected:
  Fixture fixture{GetParam()};
};

TEST_P(Trajectory, AgreesWithPyTorchAtEachStep) {
  const Steps steps = run(fixture, false);
  ASSERT_EQ(steps.losses.size(), 20U);
  for (std::size_t i = 0; i < steps.losses.size(); ++i) {
    EXPECT_NEAR(steps.losses[i] / steps.expected[i], 1.0, bar) << "step " << i + 1;
  }
  RecordProperty("worst", std::to_string(steps.worst() * 1e6) + "e-6");
  EXPECT_LT(steps.losses.back(), 0.9 * steps.losses.front()) << "nothing is learnt, so little is shown";
}

TEST_P(Trajectory, RecomputeChangesNoBit) { EXPECT_EQ(run(fixture, false).losses, run(fixture, true).losses); }

TEST_P(Trajectory, FaultsInTheOptimizerAreFound) {
  EXPECT_GT(run(fixture, true, {.lr = 1.01}).worst(), bar) << "learning rate";
  EXPECT_GT(run(fixture, true, {.lr = 0.0}).worst(), 100 * bar) << "no update";
  EXPECT_GT(run(fixture, true, {.clip = 1e9}).worst(), bar) << "no clipping";
  EXPECT_GT(run(fixture, true, {.decay = 0.0}).worst(), bar) << "no weight decay";
  EXPECT_GT(run(fixture, true, {.beta2 = 0.99}).worst(), bar) << "second moment";
}

INSTANTIATE_TEST_SUITE_P(Models, Trajectory, ::testing::ValuesIn(fixture_names()),
                         [](const auto& instance) { return instance.param; });

}  // namespace
}  // namespace tandem::testing
