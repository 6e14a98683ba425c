// Prompts are continued over the cache: each position is computed once, and no prompt depends on the others.
#include "train/sampling/generator.hpp"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "core/base/error.hpp"
#include "models/config/config.hpp"

namespace tandem {
namespace {

using namespace literals;  // NOLINT: sizes

using Tokens = std::vector<std::int32_t>;

constexpr std::int64_t positions = 60;

/// A small model with random weights, and a cache of some rows.
class GeneratorTest : public ::testing::TestWithParam<const char*> {
 protected:
  explicit GeneratorTest(std::int64_t rows = 3) {
    TrainConfig config;
    config.model = GetParam();
    config.device = "host";
    config.threads = config.update_threads = 2;
    config.seq_len = 8;  // shorter than some prompts
    config.micro_batch = rows;
    config.device_memory = 1_GiB;
    const ModelConfig model = builtin_model(config.model);
    setup_ = set_up_run(config, model, {.training = false, .predicts = false, .cached = positions});
    loaded_ = std::make_unique<LoadedModel>(setup_, nullptr);
    loaded_->engine().initialize([&](const Parameter& p, std::int64_t first, std::span<float> values) {
      initialize_parameter(model, p, 5, first, values);
      for (float& x : values) x *= 4.0F;  // so that tokens differ
    });
    generator_ = std::make_unique<Generator>(*loaded_, setup_.model->shape(), model.vocabulary);
  }

  static Tokens prompt(std::int32_t first, std::int32_t count) {
    Tokens tokens;
    for (std::int32_t i = 0; i < count; ++i) tokens.push_back((first + 37 * i) % 250);
    return tokens;
  }
  static bool on(std::size_t, std::int32_t) { return true; }
  std::vector<Continuation> generate(const std::vector<Tokens>& prompts, const GenerateOptions& options) {
    return generator_->generate(prompts, options, on);
  }
  std::int64_t computed() const { return setup_.model->decoded_positions(); }
  /// Greedy tokens by forwards of the whole sequence, without a cache.
  Tokens uncached(Tokens tokens, std::int64_t count) const;

  RunSetup setup_;
  std::unique_ptr<LoadedModel> loaded_;
  std::unique_ptr<Generator> generator_;
};

Tokens GeneratorTest::uncached(Tokens tokens, std::int64_t count) const {
  TrainConfig config;
  config.model = GetParam();
  config.device = "host";
  config.threads = config.update_threads = 2;
  config.seq_len = positions;
  config.device_memory = 1_GiB;
  const ModelConfig model = builtin_model(config.model);
  RunSetup setup = set_up_run(config, model, {.training = false, .predicts = false});
  LoadedModel plain(setup, nullptr);
  plain.engine().initialize([&](const Parameter& p, std::int64_t first, std::span<float> values) {
    initialize_parameter(model, p, 5, first, values);
    for (float& x : values) x *= 4.0F;
  });
  const std::size_t before = tokens.size();
  std::vector<float> logits(static_cast<std::size_t>(model.vocabulary));
  for (std::int64_t i = 0; i < count; ++i) {
    plain.logits(tokens, std::ssize(tokens) - 1, logits);
    tokens.push_back(draw_token(logits, tokens, {.temperature = 0.0}, {}));
  }
  return {tokens.begin() + static_cast<std::ptrdiff_t>(before), tokens.end()};
}

TEST_P(GeneratorTest, ComputesEachPositionOnce) {
  generate({prompt(1, 21)}, {.draw = {.temperature = 0.0}, .max_tokens = 12});
  EXPECT_EQ(computed(), 21 + 12 - 1);
  generate({prompt(1, 1), prompt(2, 9), prompt(3, 4)}, {.max_tokens = 5});
  EXPECT_EQ(computed(), 21 + 12 - 1 + 1 + 9 + 4 + 3 * (5 - 1));
}

TEST_P(GeneratorTest, MakesTheTokensOfForwardsWithoutACache) {
  const auto made = generate({prompt(1, 21), prompt(7, 3)}, {.draw = {.temperature = 0.0}, .max_tokens = 14});
  EXPECT_EQ(made.at(0).tokens, uncached(prompt(1, 21), 14));
  EXPECT_EQ(made.at(1).tokens, uncached(prompt(7, 3), 14));
}

TEST_P(GeneratorTest, APromptAloneHasItsTokensAmongOthers) {
  const std::vector<Tokens> prompts{prompt(1, 11), prompt(2, 1), prompt(3, 17), prompt(4, 8), prompt(5, 2)};
  const GenerateOptions options{.draw = {.temperature = 1.5, .seed = 8}, .max_tokens = 15};
  const auto together = generate(prompts, options);  // in two groups
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    Generator alone(*loaded_, setup_.model->shape(), setup_.model_config.vocabulary);
    const auto made = alone.generate(std::span(prompts).subspan(i, 1), options, on);
    EXPECT_EQ(made.at(0).tokens, together.at(i).tokens) << i;
  }
}

TEST_P(GeneratorTest, APromptThatIsGivenAgainGetsOtherTokens) {
  const auto made = generate({prompt(1, 5), prompt(1, 5)}, {.draw = {.temperature = 2.0}, .max_tokens = 10});
  EXPECT_NE(made.at(0).tokens, made.at(1).tokens);
}

TEST_P(GeneratorTest, EndsAtAnEndTokenAtAStopAndWherePositionsAreFull) {
  const Tokens free = generate({prompt(1, 5)}, {.draw = {.temperature = 0.0}, .max_tokens = 8}).at(0).tokens;
  const auto ended = generate({prompt(1, 5)}, {{.temperature = 0.0}, 8, {free.at(4)}});
  const auto first = std::find(free.begin(), free.end(), free.at(4));
  EXPECT_EQ(ended.at(0).tokens, Tokens(free.begin(), first));
  EXPECT_EQ(ended.at(0).finish, Finish::end_token);

  std::int64_t calls = 0;
  const auto stopped = generator_->generate(std::vector<Tokens>{prompt(1, 5)}, {{.temperature = 0.0}, 8, {}},
                                            [&](std::size_t, std::int32_t) { return ++calls < 3; });
  EXPECT_EQ(stopped.at(0).tokens, Tokens(free.begin(), free.begin() + 3));
  EXPECT_EQ(stopped.at(0).finish, Finish::stop);

  const auto full = generate({prompt(1, 5)}, {{.temperature = 0.0}, 1000, {}});
  EXPECT_EQ(std::ssize(full.at(0).tokens), positions - 5 + 1);  // the last needs no position
  EXPECT_EQ(full.at(0).finish, Finish::positions);
  EXPECT_EQ(std::ssize(generate({prompt(1, positions)}, {{}, 9, {}}).at(0).tokens), 1);
  EXPECT_THROW(generate({prompt(1, positions + 1)}, {}), MisuseError);
  EXPECT_THROW(generate({{}}, {}), MisuseError);
}

TEST_P(GeneratorTest, GoesOnWithoutComputingAgainWhatTheRowHas) {
  const GenerateOptions options{.draw = {.temperature = 0.0}, .max_tokens = 6};
  const Tokens begun = prompt(1, 10);
  const Continuation first = generator_->go_on(begun, options, 0, on);
  EXPECT_EQ(computed(), 10 + 5);
  Tokens longer = begun;
  longer.insert(longer.end(), first.tokens.begin(), first.tokens.end());
  for (const std::int32_t token : prompt(9, 4)) longer.push_back(token);
  const Continuation second = generator_->go_on(longer, options, 1, on);
  EXPECT_EQ(computed(), 10 + 5 + (1 + 4 + 5));  // the last token of the answer was not in the cache
  EXPECT_EQ(second.tokens, uncached(longer, 6));
  Tokens other = longer;
  other[12] = (other[12] + 1) % 250;  // from here on it is another conversation
  EXPECT_EQ(generator_->go_on(other, options, 2, on).tokens, uncached(other, 6));
  EXPECT_EQ(computed(), 10 + 5 + 10 + 8 + 5);
}

INSTANTIATE_TEST_SUITE_P(Models, GeneratorTest, ::testing::Values("tiny-gpt2", "tiny-llama"),
                         [](const auto& of) { return std::string(of.param).substr(5); });

}  // namespace
}  // namespace tandem
