// Linear layers with eight-bit factors against PyTorch's own rounding to float8_e4m3fn, and what must not depend on how
// a run treats its activations.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "tests/models/gradient_distance.hpp"
#include "tests/models/rig.hpp"

namespace tandem::testing {
namespace {

/// Bars of the mean loss and of gradients, in norm: another order of sums gives single elements another code, which
/// moves them by several thousandths.
constexpr double loss_bar = 1e-3, norm_bar = 2e-2;

class Fp8AgainstPyTorch : public ::testing::TestWithParam<std::string> {
 protected:
  Fixture fixture{"fp8/" + GetParam()};
  RunShape shape(Fp8Products how = {}) const {
    RunShape s = shape_of(fixture, false);
    s.fp8 = how;
    return s;
  }
  void set_batch(Rig& rig) const {
    rig.set_batch(fixture["tokens"].as<std::int32_t>(), fixture["targets"].as<std::int32_t>());
  }
  double mean(const std::vector<float>& losses) const {
    return std::accumulate(losses.begin(), losses.end(), 0.0) * static_cast<double>(fixture.gradient_scale());
  }
  Gradients run(const RunShape& s) const {
    Rig rig(fixture, s);
    set_batch(rig);
    rig.train(fixture.gradient_scale());
    return rig.gradients();
  }
};

/// Norm of the difference over the norm of what is expected, all parameters together.
double apart(const Gradients& actual, const Gradients& expected) {
  double off = 0.0, all = 0.0;
  for (const auto& [name, values] : expected) {
    const std::vector<float>& ours = actual.at(name);
    for (std::size_t i = 0; i < values.size(); ++i) {
      off += std::pow(static_cast<double>(ours[i]) - static_cast<double>(values[i]), 2);
      all += std::pow(static_cast<double>(values[i]), 2);
    }
  }
  return std::sqrt(off / all);
}

TEST_P(Fp8AgainstPyTorch, LossAndGradientsAgree) {
  Rig rig(fixture, shape());
  set_batch(rig);
  const double loss = mean(rig.train(fixture.gradient_scale())), expected = mean(fixture["losses"].floats());
  EXPECT_NEAR(loss, expected, loss_bar * expected);
  const double distance = apart(rig.gradients(), expected_gradients(fixture));
  EXPECT_LE(distance, norm_bar);
  RecordProperty("gradients", std::to_string(distance));
  RecordProperty("loss", std::to_string(loss / expected - 1.0));
}

/// Gradients without eight-bit factors are further away than the bar: it tells the recipes apart.
TEST_P(Fp8AgainstPyTorch, OtherRecipesAreFound) {
  RunShape plain = shape();
  plain.fp8.reset();
  EXPECT_GT(apart(run(plain), expected_gradients(fixture)), norm_bar);
  EXPECT_GT(apart(run(shape({.gradients = Fp8Format::e5m2})), expected_gradients(fixture)), norm_bar);
}

TEST_P(Fp8AgainstPyTorch, RecomputeAndEvaluationChangeNoBit) {
  const Gradients expected = run(shape());
  for (const bool selective : {false, true}) {
    RunShape s = shape();
    s.selective = selective;
    s.recomputed_blocks = selective ? 1 : fixture.config().layers;
    EXPECT_EQ(run(s), expected) << activations_of(fixture.config(), s);
  }
  RunShape forward_only = shape();
  forward_only.training = false;
  Rig trained(fixture, shape()), evaluated(fixture, forward_only);
  set_batch(trained);
  set_batch(evaluated);
  EXPECT_EQ(evaluated.evaluate(), trained.train(fixture.gradient_scale()));
}

/// A weight that is not finite makes all of its layer NaN, and so the loss.
TEST_P(Fp8AgainstPyTorch, AWeightThatIsNotFiniteMakesTheLossNaN) {
  Rig rig(fixture, shape());
  const bool gpt2 = fixture.config().family == Family::gpt2;
  const Parameter& p =
      rig.parameters().layout().parameter(gpt2 ? "block.0.attn.c_attn.weight" : "block.0.self_attn.q_proj.weight");
  std::vector<float> values = values_of(fixture, p);
  values.back() = INFINITY;
  rig.parameters().set(p, values);
  set_batch(rig);
  const std::vector<float> losses = rig.train(fixture.gradient_scale());
  const std::vector<std::int32_t> targets = fixture["targets"].as<std::int32_t>();
  for (std::size_t i = 0; i < losses.size(); ++i) EXPECT_TRUE(targets[i] < 0 || std::isnan(losses[i])) << i;
}

/// All products are as they are when the number of tokens is no multiple of 16.
TEST_P(Fp8AgainstPyTorch, OddNumbersOfTokensTakeNone) {
  RunShape s = shape(), plain = s;
  s.batch = plain.batch = 1;
  s.sequence = plain.sequence = 15;
  plain.fp8.reset();
  const std::vector<std::int32_t> tokens = ramp(15, 3), targets = ramp(15, 5);
  std::vector<std::vector<float>> losses;
  for (const RunShape& of : {s, plain}) {
    Rig rig(fixture, of);
    std::vector<std::int32_t> t = tokens, u = targets;
    for (std::int32_t& x : t) x %= 101;
    for (std::int32_t& x : u) x %= 101;
    rig.set_batch(t, u);
    losses.push_back(rig.train(1.0F));
  }
  EXPECT_EQ(losses[0], losses[1]);
}

INSTANTIATE_TEST_SUITE_P(Models, Fp8AgainstPyTorch, ::testing::Values("gpt2", "llama", "partly"),
                         [](const auto& instance) { return instance.param; });

}  // namespace
}  // namespace tandem::testing
