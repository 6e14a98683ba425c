// Tokens are drawn by their probabilities.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>

#include "core/base/error.hpp"
#include "models/config/config.hpp"
#include "train/hf/model_source.hpp"
#include "train/loop/sampler.hpp"

namespace tandem {
namespace {

std::vector<std::int32_t> bytes(const std::string& text) {
  std::vector<std::int32_t> result;
  for (const char c : text) result.push_back(static_cast<unsigned char>(c));
  return result;
}

TEST(TextOfBytes, KeepsTextAndEscapesTheRest) {
  EXPECT_EQ(text_of_bytes(bytes("a\tb\n\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80")),
            "a\tb\n\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80");
  EXPECT_EQ(text_of_bytes(bytes("\x1b[2J\x7f")), "\\x1b[2J\\x7f");
  EXPECT_EQ(text_of_bytes(bytes("\xc3")), "\\xc3");
  EXPECT_EQ(text_of_bytes(bytes("\x80x\xff")), "\\x80x\\xff");
  EXPECT_EQ(text_of_bytes(bytes("\xc0\xaf")), "\\xc0\\xaf");                    // overlong
  EXPECT_EQ(text_of_bytes(bytes("\xed\xa0\x80")), "\\xed\\xa0\\x80");           // a surrogate
  EXPECT_EQ(text_of_bytes(bytes("\xf4\x90\x80\x80")), "\\xf4\\x90\\x80\\x80");  // beyond Unicode
}

TEST(DrawToken, FollowsTheProbabilities) {
  const std::vector<float> logits{std::log(0.5F), std::log(0.3F), std::log(0.2F), -INFINITY};
  const SampleOptions options{1, 1.0, 0, 9};
  std::map<std::int32_t, int> counts;
  constexpr int draws = 20000;
  for (int i = 0; i < draws; ++i) ++counts[draw_token(logits, options, static_cast<std::uint64_t>(i))];
  EXPECT_NEAR(counts[0], 0.5 * draws, 300);  // four standard deviations
  EXPECT_NEAR(counts[1], 0.3 * draws, 300);
  EXPECT_NEAR(counts[2], 0.2 * draws, 300);
  EXPECT_EQ(counts[3], 0);
}

TEST(DrawToken, TopKAndZeroTemperatureKeepTheLikeliest) {
  const std::vector<float> logits{0.0F, 3.0F, 2.9F, 3.0F};
  EXPECT_EQ(draw_token(logits, {1, 0.0, 0, 1}, 5), 1);
  for (std::uint64_t i = 0; i < 200; ++i) {
    const std::int32_t token = draw_token(logits, {1, 5.0, 2, 1}, i);
    EXPECT_TRUE(token == 1 || token == 3);
  }
}

TEST(DrawToken, RefusesLogitsThatHaveNoOrderOrNoSum) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const double temperature : {0.0, 1.0}) {
    EXPECT_THROW(draw_token(std::vector{0.0F, nan, 1.0F}, {1, temperature, 0, 1}, 5), InputError);
    EXPECT_THROW(draw_token(std::vector{0.0F, INFINITY}, {1, temperature, 0, 1}, 5), InputError);
    EXPECT_THROW(draw_token(std::vector{-INFINITY, -INFINITY}, {1, temperature, 0, 1}, 5), InputError);
  }
}

TEST(FrozenLayout, FreezesByHuggingFaceNameAndKeepsTies) {
  const ModelConfig config = builtin_model("tiny-gpt2");
  const ParameterLayout plain = frozen_layout(config, "");
  const ParameterLayout frozen = frozen_layout(config, R"(\.h\.1\.|wte)");
  EXPECT_EQ(plain.parameter_count(), frozen.parameter_count());
  const auto a = plain.owned_parameters();
  const auto b = frozen.owned_parameters();
  ASSERT_EQ(a.size(), b.size());
  int still = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i]->full_name, b[i]->full_name);
    EXPECT_TRUE(a[i]->options.trainable);
    still += b[i]->options.trainable ? 0 : 1;
  }
  EXPECT_EQ(still, 13);  // twelve of the block, and the token embedding with the head tied to it
}

}  // namespace
}  // namespace tandem
