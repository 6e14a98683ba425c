// Losses and every gradient against PyTorch in fp32.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "tests/models/gradient_distance.hpp"
#include "tests/models/rig.hpp"

namespace tandem::testing {
namespace {

constexpr double gradient_bar = 1e-5;

class AgainstPyTorch : public ::testing::TestWithParam<std::string> {
 protected:
  Fixture fixture{GetParam()};
  /// Gradients of the fixture's batch, after its losses were checked.
  Gradients run(Rig& rig) {
    rig.set_batch(fixture["tokens"].as<std::int32_t>(), fixture["targets"].as<std::int32_t>());
    check_losses(rig.train(fixture.gradient_scale()));
    return rig.gradients();
  }
  void check_losses(const std::vector<float>& losses) const {
    const std::vector<float> expected = fixture["losses"].floats();
    ASSERT_EQ(losses.size(), expected.size());
    for (std::size_t i = 0; i < losses.size(); ++i)
      EXPECT_NEAR(losses[i], expected[i], gradient_bar * largest(expected));
  }
};

TEST_P(AgainstPyTorch, LossesAndEveryGradientAgree) {
  Rig rig(fixture, shape_of(fixture, false));
  const Gradients ours = run(rig);
  EXPECT_EQ(ours.size(), fixture.gradient_count()) << "a gradient of the reference is not compared";
  const Distance d = distance(ours, expected_gradients(fixture));
  EXPECT_LE(d.worst, gradient_bar) << d.parameter;
  RecordProperty("worst", std::to_string(d.worst * 1e6) + "e-6 in " + d.parameter);
}

TEST_P(AgainstPyTorch, WrittenInBf16TheyAreTheSumsRounded) {
  for (const DType compute : {DType::f32, DType::bf16}) {
    RunShape shape = shape_of(fixture, false);
    shape.compute = compute;
    Rig sums(fixture, shape), rounded(fixture, shape, DType::bf16);
    for (Rig* rig : {&sums, &rounded}) {
      rig->set_batch(fixture["tokens"].as<std::int32_t>(), fixture["targets"].as<std::int32_t>());
    }
    EXPECT_EQ(rounded.train(fixture.gradient_scale()), sums.train(fixture.gradient_scale()));
    Gradients expected = sums.gradients();
    int written = 0;
    for (const Parameter* p : rounded.parameters().layout().owned_parameters()) {
      if (p->options.gradient != DType::bf16) continue;
      ++written;
      for (std::int64_t i = 0; i < hf_tensor_count(*p); ++i) {
        const HfTensor hf = hf_tensor_of(fixture.config(), *p, i);
        if (hf.first_row > 0) continue;  // with the first part all of the tensor is rounded
        for (float& x : expected.at(hf.name)) x = numerics::bf16_to_float(numerics::round_to_bf16(x));
      }
    }
    EXPECT_EQ(rounded.gradients(), expected);
    const bool experts = fixture.config().experts > 0;  // their router is a product, too
    EXPECT_EQ(written, fixture.config().layers * (fixture.config().family == Family::gpt2 ? 4 : experts ? 8 : 7));
  }
}

TEST_P(AgainstPyTorch, RecomputeChangesNoBit) {
  RunShape shape = shape_of(fixture, false);
  Rig kept(fixture, shape);
  const Gradients expected = run(kept);
  for (const bool selective : {false, true}) {
    shape.selective = selective;
    std::size_t bytes = selective ? kept.carved() + 1 : kept.carved();
    for (shape.recomputed_blocks = selective ? 0 : 1; shape.recomputed_blocks <= fixture.config().layers;
         ++shape.recomputed_blocks) {
      Rig rig(fixture, shape);
      EXPECT_EQ(run(rig), expected) << activations_of(fixture.config(), shape);
      // The last set of buffers only moves into the workspace, where there may have been room for it.
      const bool moves = selective && shape.recomputed_blocks == fixture.config().layers;
      EXPECT_LT(rig.carved(), bytes + (moves ? 1 : 0)) << activations_of(fixture.config(), shape);
      bytes = rig.carved();
    }
  }
}

TEST_P(AgainstPyTorch, RunningAgainChangesNoBit) {
  Rig rig(fixture, shape_of(fixture, true));
  const Gradients first = run(rig);
  rig.evaluate();
  rig.logits(1);
  EXPECT_EQ(first, run(rig));
}

TEST_P(AgainstPyTorch, GradientsAreAddedToWhatIsThere) {
  Rig rig(fixture, shape_of(fixture, true));
  Gradients once = run(rig);
  rig.model().train(rig.parameters(), fixture.gradient_scale(), rig.stream());
  const Gradients twice = rig.gradients();
  for (auto& [name, values] : once) {
    for (float& x : values) x *= 2.0F;
  }
  EXPECT_LE(distance(twice, once).worst, 1e-6);
}

TEST_P(AgainstPyTorch, EvaluationGivesTheSameLosses) {
  RunShape forward_only = shape_of(fixture, false);
  forward_only.training = false;
  for (const RunShape& shape : {shape_of(fixture, false), shape_of(fixture, true), forward_only}) {
    Rig rig(fixture, shape);
    rig.set_batch(fixture["tokens"].as<std::int32_t>(), fixture["targets"].as<std::int32_t>());
    check_losses(rig.evaluate());
    check_losses(rig.evaluate());
  }
}

TEST_P(AgainstPyTorch, LogitsOfTheLastPositionAgree) {
  RunShape forward_only = shape_of(fixture, false);
  forward_only.training = false;
  for (const RunShape& shape : {shape_of(fixture, false), shape_of(fixture, true), forward_only}) {
    Rig rig(fixture, shape);
    rig.set_batch(fixture["tokens"].as<std::int32_t>(), fixture["targets"].as<std::int32_t>());
    const std::vector<float> ours = rig.logits(shape.sequence - 1);
    const std::vector<float> expected = fixture["logits"].floats();
    ASSERT_EQ(ours.size(), expected.size());
    for (std::size_t i = 0; i < ours.size(); ++i) EXPECT_NEAR(ours[i], expected[i], gradient_bar * largest(expected));
  }
}

// -- The bar finds what is wrong ---------------------------------------------------------------------------

TEST_P(AgainstPyTorch, AMissingVectorGradientIsFound) {
  const Gradients expected = expected_gradients(fixture);
  const ParameterLayout layout = layout_of(fixture.config());
  for (const Parameter* p : layout.owned_parameters()) {
    if (p->shape.rank() > 1 || p->name == "attn.c_attn.bias") continue;
    Gradients wrong = expected;
    std::ranges::fill(wrong.at(hf_tensor_of(fixture.config(), *p).name), 0.0F);
    EXPECT_GT(distance(wrong, expected).worst, 100 * gradient_bar) << p->full_name;
  }
}

TEST_P(AgainstPyTorch, AnErrorOfTwoInAHundredThousandIsFound) {
  const Gradients expected = expected_gradients(fixture);
  double overall = 0.0;
  for (const auto& [name, values] : expected) overall = std::max(overall, largest(values));
  for (const auto& [name, values] : expected) {
    if (largest(values) < 1e-3 * overall) continue;
    Gradients wrong = expected;
    for (float& x : wrong.at(name)) x *= 1.0F + 2e-5F;
    EXPECT_GT(distance(wrong, expected).worst, gradient_bar) << name;
  }
}

/// One weight changed where a sign or an index might be wrong.
void expect_found(const Fixture& fixture, const std::string& full_name, void (*plant)(std::vector<float>&)) {
  Rig rig(fixture, shape_of(fixture, false));
  const Parameter& p = rig.parameters().layout().parameter(full_name);
  std::vector<float> values = values_of(fixture, p);
  plant(values);
  rig.parameters().set(p, values);
  rig.set_batch(fixture["tokens"].as<std::int32_t>(), fixture["targets"].as<std::int32_t>());
  rig.train(fixture.gradient_scale());
  EXPECT_GT(distance(rig.gradients(), expected_gradients(fixture)).worst, 100 * gradient_bar) << full_name;
}

TEST_P(AgainstPyTorch, AWrongSignOrAnotherOrderInAWeightIsFound) {
  const bool gpt2 = fixture.config().family == Family::gpt2;
  const auto negate_first = [](std::vector<float>& w) { w.front() = -w.front(); };
  const auto rotate = [](std::vector<float>& w) { std::rotate(w.begin(), w.begin() + 1, w.end()); };
  expect_found(fixture, gpt2 ? "block.0.attn.c_attn.weight" : "block.0.self_attn.q_proj.weight", negate_first);
  const bool experts = fixture.config().experts > 0;
  expect_found(fixture,
               gpt2      ? "block.1.mlp.c_fc.bias"
               : experts ? "block.1.mlp.experts.up_proj.weight"
                         : "block.1.mlp.up_proj.weight",
               rotate);
}

class OthersAgainstPyTorch : public AgainstPyTorch {
 protected:
  void expect_another_model(const ModelConfig& config) const {
    Rig rig(config, shape_of(fixture, false));
    rig.load(fixture);
    rig.set_batch(fixture["tokens"].as<std::int32_t>(), fixture["targets"].as<std::int32_t>());
    rig.train(fixture.gradient_scale());
    EXPECT_GT(distance(rig.gradients(), expected_gradients(fixture)).worst, 10 * gradient_bar);
  }
};

class RotatingAgainstPyTorch : public OthersAgainstPyTorch {};

TEST_P(RotatingAgainstPyTorch, AnotherRotationOfPositionsIsFound) {
  ModelConfig turned = fixture.config();
  turned.rope_theta *= 1.01;
  expect_another_model(turned);
  if (!fixture.config().rope_scaling || std::holds_alternative<DynamicRopeScaling>(*fixture.config().rope_scaling)) {
    return;
  }
  turned = fixture.config();
  turned.rope_scaling.reset();
  expect_another_model(turned);
}

TEST_P(RotatingAgainstPyTorch, AnotherAttentionOfALayerIsFound) {
  for (std::size_t layer = 0; layer < fixture.config().attention.size(); ++layer) {
    for (const bool windowed : {false, true}) {
      ModelConfig other = fixture.config();
      bool& kind = windowed ? other.attention[layer].windowed : other.attention[layer].rotated;
      if (windowed && other.window == 0) continue;
      kind = !kind;
      expect_another_model(other);
    }
  }
  for (const std::int64_t by : {-1, 1}) {
    ModelConfig other = fixture.config();
    if (other.window == 0) continue;
    other.window += by;
    expect_another_model(other);
  }
}

/// Checks that the model of a fixture is another one with its description changed.
void expect_another(const Fixture& fixture, const std::function<void(ModelConfig&)>& change) {
  ModelConfig other = fixture.config();
  change(other);
  Rig rig(other, shape_of(fixture, false));
  rig.load(fixture);
  rig.set_batch(fixture["tokens"].as<std::int32_t>(), fixture["targets"].as<std::int32_t>());
  rig.train(fixture.gradient_scale());
  EXPECT_GT(distance(rig.gradients(), expected_gradients(fixture)).worst, 10 * gradient_bar);
}

TEST(Gemma, AnotherNormGateFactorOrRopeIsFound) {
  const Fixture fixture("gemma3");
  expect_another(fixture, [](ModelConfig& c) { c.norm_offset = 1.0 + 1.0 / 256; });
  expect_another(fixture, [](ModelConfig& c) { c.gate = Gate::silu; });
  expect_another(fixture, [](ModelConfig& c) { c.embedding_factor *= 1.001; });
  expect_another(fixture, [](ModelConfig& c) { *c.attention_scale *= 1.001; });
  expect_another(fixture, [](ModelConfig& c) { *c.window_theta *= 1.01; });
  expect_another(fixture, [](ModelConfig& c) { c.window_theta.reset(); });
}

TEST(Granite, AnotherFactorIsFound) {
  const Fixture fixture("granite");
  expect_another(fixture, [](ModelConfig& c) { c.embedding_factor *= 1.001; });
  expect_another(fixture, [](ModelConfig& c) { c.residual_factor *= 1.001; });
  expect_another(fixture, [](ModelConfig& c) { *c.attention_scale *= 1.001; });
  expect_another(fixture, [](ModelConfig& c) { c.logits_divisor *= 1.001; });
}

class ExpertsAgainstPyTorch : public OthersAgainstPyTorch {};

TEST_P(ExpertsAgainstPyTorch, AnotherChoiceIsFound) {
  ModelConfig other = fixture.config();
  other.normalized_weights = !other.normalized_weights;
  expect_another_model(other);
  other = fixture.config();
  --other.chosen_experts;
  expect_another_model(other);
  const auto swap_ends = [](std::vector<float>& w) { std::swap(w.front(), w.back()); };
  expect_found(fixture, "block.0.mlp.gate.weight", swap_ends);
  const auto next_expert = [](std::vector<float>& w) { std::rotate(w.begin(), w.begin() + 24 * 11, w.end()); };
  expect_found(fixture, "block.1.mlp.experts.down_proj.weight", next_expert);
}

INSTANTIATE_TEST_SUITE_P(Models, ExpertsAgainstPyTorch, ::testing::ValuesIn(expert_fixture_names()),
                         [](const auto& instance) { return instance.param; });

INSTANTIATE_TEST_SUITE_P(Models, AgainstPyTorch, ::testing::ValuesIn(fixture_names()),
                         [](const auto& instance) { return instance.param; });

INSTANTIATE_TEST_SUITE_P(Models, RotatingAgainstPyTorch, ::testing::ValuesIn(llama_fixture_names()),
                         [](const auto& instance) { return instance.param; });

}  // namespace
}  // namespace tandem::testing
