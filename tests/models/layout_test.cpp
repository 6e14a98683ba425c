// Parameters, their Hugging Face names, and their first values.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "core/numerics/random.hpp"
#include "models/config/rope.hpp"
#include "models/transformer/transformer.hpp"
#include "tests/models/fixture.hpp"

namespace tandem::testing {
namespace {

TEST(Layout, ParameterCountsAreThePublishedOnes) {
  const std::pair<const char*, std::int64_t> published[] = {
      {"gpt2", 124439808},         {"gpt2-medium", 354823168},    {"gpt2-large", 774030080},
      {"gpt2-xl", 1557611200},     {"llama3.2-1b", 1235814400},   {"llama3.2-3b", 3212749824},
      {"llama3.1-8b", 8030261248}, {"qwen2.5-0.5b", 494032768},   {"qwen2.5-1.5b", 1543714304},
      {"qwen2.5-7b", 7615616512},  {"qwen3-0.6b", 596049920},     {"qwen3-1.7b", 1720574976},
      {"qwen3-4b", 4022468096},    {"mistral-7b", 7248023552},    {"qwen3-8b", 8190735360},
      {"qwen3-14b", 14768307200},  {"qwen3-32b", 32762123264},    {"llama3.1-70b", 70553706496},
      {"phi-3-mini", 3821079552},  {"phi-4", 14659507200},        {"smollm3-3b", 3075098624},
      {"olmo2-7b", 7298617344},    {"olmo2-13b", 13716198400},    {"qwen3-30b-a3b", 30532122624},
      {"olmoe-1b-7b", 6919161856}, {"mixtral-8x7b", 46702792704}, {"gemma3-270m", 268098176},
      {"gemma3-1b", 999885952}};
  for (const auto& [name, count] : published)
    EXPECT_EQ(layout_of(builtin_model(name)).parameter_count(), count) << name;
  for (const char* name : {"tiny-gpt2", "tiny-llama", "tiny-moe"}) {
    EXPECT_GT(layout_of(builtin_model(name)).parameter_count(), 1000000) << name;
    EXPECT_LT(layout_of(builtin_model(name)).parameter_count(), 4000000) << name;
  }
}

TEST(Layout, NamesAndShapesAreThoseOfTransformers) {
  for (const std::string& name : fixture_names()) {
    const Fixture fixture(name);
    std::set<std::string> names;
    const ParameterLayout layout = layout_of(fixture.config());
    for (const Parameter* p : layout.owned_parameters()) {
      const std::int64_t tensors = hf_tensor_count(*p);
      EXPECT_EQ(tensors, p->name.starts_with("mlp.experts.") ? fixture.config().experts : 1) << p->full_name;
      EXPECT_EQ(p->options.decay, p->shape.rank() > 1) << p->full_name;
      Shape shape = p->shape;
      if (tensors > 1) shape = {shape[1], shape[2]};
      for (std::int64_t t = 0; t < tensors; ++t) {
        const HfTensor hf = hf_tensor_of(fixture.config(), *p, t);
        ASSERT_TRUE(fixture.has(hf.name)) << hf.name;
        std::vector<std::int64_t> stored = fixture[hf.name].shape;
        if (hf.transposed) std::ranges::reverse(stored);
        ASSERT_EQ(stored.size(), static_cast<std::size_t>(shape.rank())) << hf.name;
        EXPECT_EQ(stored[0], hf.rows) << hf.name;
        for (int i = 1; i < shape.rank(); ++i) EXPECT_EQ(stored[static_cast<std::size_t>(i)], shape[i]) << hf.name;
        EXPECT_TRUE(fixture.config().fused_tensors || hf.rows == shape[0]) << hf.name;
        EXPECT_LE(hf.first_row + shape[0], hf.rows) << hf.name;
        names.insert(hf.name);
      }
    }
    EXPECT_EQ(names.size(), fixture.gradient_count()) << name;
  }
}

TEST(Layout, LayersAreEmbeddingBlocksHead) {
  for (const std::string& name : builtin_models()) {
    const ModelConfig config = builtin_model(name);
    const ParameterLayout layout = layout_of(config);
    ASSERT_EQ(layout.layer_count(), config.layers + 2) << name;
    EXPECT_EQ(layout.layer(0).name, "embedding");
    EXPECT_EQ(layout.layers().back().name, "head");
    const Parameter& head = layout.layers().back().parameters.back();
    EXPECT_EQ(head.name, "lm_head");
    EXPECT_EQ(head.tied(), config.tied_head) << name;
  }
}

std::vector<float> first_values(const ModelConfig& config, const std::string& full_name, std::uint64_t seed) {
  const ParameterLayout layout = layout_of(config);
  const Parameter& p = layout.parameter(full_name);
  std::vector<float> values(static_cast<std::size_t>(p.count), NAN);
  initialize_parameter(config, p, seed, 0, values);
  return values;
}

double deviation(const std::vector<float>& values) {
  double squares = 0.0;
  for (const float x : values) squares += static_cast<double>(x) * static_cast<double>(x);
  return std::sqrt(squares / static_cast<double>(values.size()));
}

TEST(Initialize, NormsBiasesAndScales) {
  const ModelConfig gpt2 = builtin_model("tiny-gpt2");
  const double residual = 0.02 / std::sqrt(8.0);
  EXPECT_THAT(first_values(gpt2, "block.0.ln_1.weight", 1), ::testing::Each(1.0F));
  EXPECT_THAT(first_values(gpt2, "block.0.ln_1.bias", 1), ::testing::Each(0.0F));
  EXPECT_THAT(first_values(gpt2, "head.norm.weight", 1), ::testing::Each(1.0F));
  EXPECT_THAT(first_values(gpt2, "block.3.attn.c_attn.bias", 1), ::testing::Each(0.0F));
  EXPECT_NEAR(deviation(first_values(gpt2, "embedding.tokens", 1)), 0.02, 0.0004);
  EXPECT_NEAR(deviation(first_values(gpt2, "embedding.positions", 1)), 0.02, 0.0004);
  EXPECT_NEAR(deviation(first_values(gpt2, "block.1.mlp.c_fc.weight", 1)), 0.02, 0.0002);
  EXPECT_NEAR(deviation(first_values(gpt2, "block.1.mlp.c_proj.weight", 1)), residual, 0.02 * residual);
  const ModelConfig llama = builtin_model("tiny-llama");
  EXPECT_THAT(first_values(llama, "block.0.post_attention_layernorm.weight", 1), ::testing::Each(1.0F));
  EXPECT_NEAR(deviation(first_values(llama, "block.1.mlp.down_proj.weight", 1)), residual, 0.02 * residual);
  EXPECT_NEAR(deviation(first_values(llama, "block.1.self_attn.o_proj.weight", 1)), residual, 0.02 * residual);
  const ModelConfig gemma = builtin_model("gemma3-270m");  // its norms add 1 to their weights
  EXPECT_THAT(first_values(gemma, "block.0.pre_feedforward_layernorm.weight", 1), ::testing::Each(0.0F));
  EXPECT_THAT(first_values(gemma, "head.norm.weight", 1), ::testing::Each(0.0F));
  ModelConfig qwen3 = llama;
  qwen3.qk_norm = QkNorm::per_head;
  EXPECT_THAT(first_values(qwen3, "block.0.self_attn.q_norm.weight", 1), ::testing::Each(1.0F));
}

TEST(Initialize, DependsOnSeedAndNameAlone) {
  const ModelConfig config = builtin_model("tiny-gpt2");
  const auto values = first_values(config, "block.0.mlp.c_fc.weight", 7);
  EXPECT_EQ(values, first_values(config, "block.0.mlp.c_fc.weight", 7));
  EXPECT_NE(values, first_values(config, "block.0.mlp.c_fc.weight", 8));
  EXPECT_NE(values, first_values(config, "block.1.mlp.c_fc.weight", 7));
  ModelConfig smaller = config;
  smaller.ffn = 5;
  const auto fewer = first_values(smaller, "block.0.mlp.c_fc.weight", 7);
  EXPECT_TRUE(std::equal(fewer.begin(), fewer.end(), values.begin())) << "element i depends on i, not on the size";
}

TEST(Initialize, PiecesAreTheWhole) {
  const ModelConfig config = builtin_model("tiny-gpt2");
  const ParameterLayout layout = layout_of(config);
  for (const char* const name : {"block.0.mlp.c_fc.weight", "block.0.ln_1.weight", "block.1.attn.c_attn.bias"}) {
    const auto whole = first_values(config, name, 7);
    for (const std::size_t piece : {std::size_t{1}, std::size_t{22}, std::size_t{55}, whole.size() - 1}) {
      std::vector<float> values(whole.size(), NAN);
      for (std::size_t first = 0; first < values.size(); first += piece) {
        initialize_parameter(config, layout.parameter(name), 7, static_cast<std::int64_t>(first),
                             std::span(values).subspan(first, std::min(piece, values.size() - first)));
      }
      EXPECT_EQ(values, whole) << name << " in pieces of " << piece;
    }
  }
}

TEST(Initialize, WrongSizeIsNamed) {
  const ModelConfig config = builtin_model("tiny-gpt2");
  const ParameterLayout layout = layout_of(config);
  const Parameter& bias = layout.parameter("block.0.ln_1.bias");
  std::vector<float> values(static_cast<std::size_t>(bias.count) + 1);
  EXPECT_THROW(initialize_parameter(config, bias, 1, 0, values), MisuseError);
  EXPECT_THROW(initialize_parameter(config, bias, 1, -1, std::span(values).first(1)), MisuseError);
  EXPECT_THROW(initialize_parameter(config, bias, 1, bias.count, std::span(values).first(1)), MisuseError);
}

// Known answers of the generator's authors (Random123, kat_vectors).
TEST(Random, PhiloxKnownAnswers) {
  const auto words = [](const numerics::Philox128& b) {
    return std::vector<std::uint32_t>(std::begin(b.word), std::end(b.word));
  };
  EXPECT_THAT(words(numerics::philox({{0, 0, 0, 0}}, 0)),
              ::testing::ElementsAre(0x6627e8d5U, 0xe169c58dU, 0xbc57ac4cU, 0x9b00dbd8U));
  constexpr std::uint32_t ones = 0xffffffffU;
  EXPECT_THAT(words(numerics::philox({{ones, ones, ones, ones}}, ~std::uint64_t{0})),
              ::testing::ElementsAre(0x408f276dU, 0x41c83b0eU, 0xa20bc7c6U, 0x6d5451fdU));
  EXPECT_THAT(words(numerics::philox({{0x243f6a88U, 0x85a308d3U, 0x13198a2eU, 0x03707344U}}, 0x299f31d0a4093822U)),
              ::testing::ElementsAre(0xd16cfe09U, 0x94fdccebU, 0x5001e420U, 0x24126ea1U));
  EXPECT_THAT(words(numerics::philox<7>({{0, 0, 0, 0}}, 0)),
              ::testing::ElementsAre(0x5f6fb709U, 0x0d893f64U, 0x4f121f81U, 0x4f730a48U));
  EXPECT_THAT(words(numerics::philox<7>({{0x243f6a88U, 0x85a308d3U, 0x13198a2eU, 0x03707344U}}, 0x299f31d0a4093822U)),
              ::testing::ElementsAre(0x4dfccabaU, 0x190a87f0U, 0xc47362baU, 0xb6b5242aU));
}

TEST(Random, UniformIsNeverZero) {
  EXPECT_GT(numerics::uniform_of({{0, 0, 0, 0}}, 0), 0.0);
  EXPECT_EQ(numerics::uniform_of({{0xffffffffU, 0xffffffffU, 0, 0}}, 0), 1.0);
}

TEST(Rope, Llama3ScalingKeepsFastAndStretchesSlowRotations) {
  const ModelConfig scaled = builtin_model("llama3.1-8b");
  ModelConfig plain = scaled;
  plain.rope_scaling.reset();
  const auto frequency = [](const ModelConfig& c, std::int64_t i) { return rope_frequency(c, c.rope(false), i, 100); };
  EXPECT_EQ(frequency(scaled, 0), 1.0);
  EXPECT_EQ(frequency(scaled, 1), frequency(plain, 1));
  EXPECT_DOUBLE_EQ(frequency(scaled, 63), frequency(plain, 63) / 8.0);
  EXPECT_LT(frequency(scaled, 32), frequency(plain, 32));
  EXPECT_GT(frequency(scaled, 32), frequency(plain, 32) / 8.0);
}

ModelConfig with_scaling(const RopeScaling& scaling) {
  ModelConfig c = builtin_model("llama3.1-8b");
  c.positions = 4096;
  c.rope_theta = 10000.0;
  c.rope_scaling = scaling;
  return c;
}

TEST(Rope, YarnKeepsFastAndStretchesSlowRotationsAndMakesAllLonger) {
  const ModelConfig c = with_scaling(YarnRopeScaling{.factor = 16.0, .original_positions = 4096.0});
  const auto ratio = [&](std::int64_t i) {
    return rope_frequency(c, {c.rope_theta}, i, 100) / rope_frequency(c, c.rope(false), i, 100);
  };
  // 64 ln(4096 / (32 2 pi)) / ln(10000) is 20.95, and of one turn 45.03.
  EXPECT_DOUBLE_EQ(ratio(20), 1.0);
  EXPECT_GT(ratio(21), 1.0);
  EXPECT_LT(ratio(45), 16.0);
  EXPECT_DOUBLE_EQ(ratio(46), 16.0);
  EXPECT_DOUBLE_EQ(rope_magnitude(c, c.rope(false)), 0.1 * std::log(16.0) + 1.0);
}

TEST(Rope, LongFactorsAreThoseOfLongSequences) {
  LongRopeScaling scaling{.short_factors = std::vector<double>(64, 2.0),
                          .long_factors = std::vector<double>(64, 3.0),
                          .original_positions = 1024.0,
                          .factor = {},
                          .attention_factor = {}};
  const ModelConfig c = with_scaling(scaling);
  const double plain = rope_frequency(c, {c.rope_theta}, 5, 1);
  EXPECT_DOUBLE_EQ(rope_frequency(c, c.rope(false), 5, 1024), plain / 2.0);
  EXPECT_DOUBLE_EQ(rope_frequency(c, c.rope(false), 5, 1025), plain / 3.0);
  EXPECT_DOUBLE_EQ(rope_magnitude(c, c.rope(false)), std::sqrt(1.0 + std::log(4.0) / std::log(1024.0)));
  scaling.factor = 0.5;
  EXPECT_EQ(rope_magnitude(c, {c.rope_theta, scaling}), 1.0);
  scaling.attention_factor = 1.5;
  EXPECT_EQ(rope_magnitude(c, {c.rope_theta, scaling}), 1.5);
}

TEST(Layout, AWindowIsCountedAsWhatItLetsSee) {
  EXPECT_EQ(positions_seen(7, 0), 4.0);
  EXPECT_EQ(positions_seen(7, 7), 4.0);
  EXPECT_EQ(positions_seen(7, 9), 4.0);
  EXPECT_EQ(positions_seen(7, 1), 1.0);
  EXPECT_DOUBLE_EQ(positions_seen(7, 3), (1.0 + 2.0 + 5 * 3.0) / 7.0);
}

}  // namespace
}  // namespace tandem::testing
