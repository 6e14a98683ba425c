// Gradients of the token embedding and the output weight: their type, and their bits.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "tests/models/rig.hpp"

namespace tandem::testing {
namespace {

ModelConfig untied(std::int64_t width) {
  ModelConfig c = tiny("tiny-llama");
  c.tied_head = false;
  c.width = width;
  return c;
}

// With so few tokens, the gradients of all logits take less memory than the sum of the weight's.
TEST(Transformer, GradientsOfTheEndsInBf16AreTheSumsRounded) {
  for (const DType compute : {DType::f32, DType::bf16}) {
    const ModelConfig config = untied(192);
    const RunShape shape{.batch = 3, .sequence = 32, .micro_batches = 2, .compute = compute};
    ASSERT_EQ(ends_gradient(config, shape), DType::bf16);
    Rig sums(config, shape), whole(config, shape, nullptr, DType::f32, DType::bf16);
    for (Rig* rig : {&sums, &whole}) {
      rig->load_random(7);
      for (const std::int32_t micro : {0, 1}) rig->set_batch(ramp(96, 3 + micro), ramp(96, 11 + micro), micro);
    }
    EXPECT_EQ(whole.train(1.0F, 2), sums.train(1.0F, 2));
    for (const std::size_t micro : {0U, 1U}) {
      Gradients expected = sums.gradients(micro);
      for (const char* name : {"model.embed_tokens.weight", "lm_head.weight"}) {
        for (float& x : expected.at(name)) x = numerics::bf16_to_float(numerics::round_to_bf16(x));
      }
      EXPECT_EQ(whole.gradients(micro), expected);
    }
  }
}

TEST(Transformer, TheHeadsGradientBesideALongSequenceIsTheSumRounded) {
  ModelConfig config = untied(64);
  config.vocabulary = 8192;
  config.positions = 1024;
  config.layers = 1;
  const RunShape shape{.sequence = 1024};
  ASSERT_EQ(ends_gradient(config, shape), DType::bf16);
  ASSERT_LT(head_rows_at_once(config, shape), config.vocabulary);
  Rig sums(config, shape), slices(config, shape, nullptr, DType::f32, DType::bf16);
  for (Rig* rig : {&sums, &slices}) {
    rig->load_random(7);
    rig->set_batch(ramp(1024, 3), ramp(1024, 11));
  }
  EXPECT_EQ(slices.train(1.0F), sums.train(1.0F));
  Gradients expected = sums.gradients();
  const Gradients actual = slices.gradients();
  const auto to_bf16 = [](float x) { return numerics::bf16_to_float(numerics::round_to_bf16(x)); };
  for (float& x : expected.at("model.embed_tokens.weight")) x = to_bf16(x);
  // Chunks of rows are added in another order than one product has: where that crosses a middle, by one step of bf16.
  const std::vector<float>&sum = expected.at("lm_head.weight"), &written = actual.at("lm_head.weight");
  float largest = 0.0F;
  for (const float x : sum) largest = std::max(largest, std::abs(x));
  for (std::size_t i = 0; i < sum.size(); ++i) {
    ASSERT_NEAR(written[i], to_bf16(sum[i]), std::abs(sum[i]) / 128.0F + 1e-6F * largest) << i;
  }
  expected.at("lm_head.weight") = written;
  EXPECT_EQ(actual, expected);
}

TEST(Transformer, GradientsOfTheEndsAreWrittenWholeForFewTokensAlone) {
  const ModelConfig config = untied(192);
  const auto of = [&](std::int64_t batch, std::int64_t sequence, DType compute) {
    return ends_gradient(config, {.batch = batch, .sequence = sequence, .compute = compute});
  };
  EXPECT_EQ(of(3, 64, DType::bf16), DType::bf16);
  EXPECT_EQ(of(1, 193, DType::bf16), DType::bf16) << "a sequence too long for smaller micro-batches to help";
  EXPECT_EQ(of(4, 64, DType::bf16), DType::f32);
  EXPECT_EQ(of(2, 48, DType::f32), DType::bf16);
  EXPECT_EQ(of(3, 33, DType::f32), DType::f32) << "whose gradients of logits take twice as much";
  EXPECT_EQ(of(std::int64_t{1} << 62, 128, DType::bf16), DType::f32) << "before such a shape is refused";
  ModelConfig tied = config;
  tied.tied_head = true;
  EXPECT_EQ(ends_gradient(tied, {.sequence = 192, .compute = DType::bf16}), DType::bf16) << "also where both are one";
  EXPECT_EQ(ends_gradient(tied, {.sequence = 193, .compute = DType::bf16}), DType::f32)
      << "whose rows of tokens would take their square";
  const auto type_of = [&](const ParameterLayout& layout, int layer) {
    return layout.layer(layer).parameters.back().options.gradient;
  };
  const ParameterLayout whole = layout_of(config, DType::bf16, DType::bf16), sums = layout_of(config);
  for (const int layer : {0, whole.layer_count() - 1}) {
    EXPECT_EQ(type_of(whole, layer), DType::bf16) << layer;
    EXPECT_EQ(type_of(sums, layer), DType::f32) << layer;
  }
  EXPECT_EQ(type_of(layout_of(tiny("tiny-llama"), DType::bf16, DType::bf16), 0), DType::bf16);
}

TEST(Transformer, AWeightOfTheHeadIsWrittenAtOnceOrInSlicesOfBoundedGradients) {
  const ModelConfig config = builtin_model("llama3.1-8b");
  const auto of = [&](std::int64_t sequence) {
    return head_rows_at_once(config, {.sequence = sequence, .compute = DType::bf16});
  };
  EXPECT_EQ(of(4096), config.vocabulary);
  EXPECT_EQ(of(16384), 8192);
  EXPECT_EQ(of(131072), 1024);
  EXPECT_EQ(of(4160), (std::int64_t{128} << 20) / 4160 / 64 * 64);
  const std::int64_t in_fp32 = head_rows_at_once(config, {.sequence = 16384, .compute = DType::f32});
  EXPECT_EQ(in_fp32, 4096);
  // Half of what bf16 saves of 32,768 rows of 4,096.
  EXPECT_EQ(head_rows_at_once(builtin_model("mistral-7b"), {.sequence = 8192, .compute = DType::bf16}), 8192);
  EXPECT_EQ(head_rows_at_once(untied(192), {.sequence = 193, .compute = DType::bf16}), untied(192).vocabulary);
}

// The head writes all rows of a table that is the embedding's too, and keeps in fp32 those that the embedding adds to.
TEST(Transformer, TheGradientOfATiedTableInBf16IsTheSumRoundedOnce) {
  for (const char* name : {"tiny-gpt2", "tiny-llama"}) {
    for (const DType compute : {DType::f32, DType::bf16}) {
      SCOPED_TRACE(name);
      const ModelConfig config = tiny(name);
      const RunShape shape{.batch = 2, .sequence = 30, .micro_batches = 2, .compute = compute};  // made last
      ASSERT_EQ(ends_gradient(config, shape), DType::bf16);
      Rig sums(config, shape), whole(config, shape, nullptr, DType::f32, DType::bf16);
      for (Rig* rig : {&sums, &whole}) {
        rig->load_random(7);
        for (const std::int32_t micro : {0, 1}) {
          std::vector<std::int32_t> tokens = ramp(60, 3 + micro);
          std::copy_n(tokens.begin(), 25, tokens.begin() + 31);  // tokens that come twice
          rig->set_batch(tokens, ramp(60, 11 + micro), micro);
        }
      }
      EXPECT_EQ(whole.train(1.0F, 2), sums.train(1.0F, 2));
      for (const std::size_t micro : {0U, 1U}) {
        Gradients expected = sums.gradients(micro);
        const char* const table =
            config.family == Family::gpt2 ? "transformer.wte.weight" : "model.embed_tokens.weight";
        for (float& x : expected.at(table)) x = numerics::bf16_to_float(numerics::round_to_bf16(x));
        EXPECT_EQ(whole.gradients(micro), expected);
      }
    }
  }
}

}  // namespace
}  // namespace tandem::testing
