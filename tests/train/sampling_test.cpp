// Tokens are drawn by their probabilities; texts come in pieces that are whole, and end at stops.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>

#include "core/base/error.hpp"
#include "models/config/config.hpp"
#include "train/hf/model_source.hpp"
#include "train/hf/trained_layout.hpp"
#include "train/sampling/draw.hpp"
#include "train/sampling/text_codec.hpp"

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
  const DrawOptions options{.temperature = 1.0, .seed = 9};
  std::map<std::int32_t, int> counts;
  constexpr int draws = 20000;
  for (int i = 0; i < draws; ++i) ++counts[draw_token(logits, {}, options, {static_cast<std::uint64_t>(i)})];
  EXPECT_NEAR(counts[0], 0.5 * draws, 300);  // four standard deviations
  EXPECT_NEAR(counts[1], 0.3 * draws, 300);
  EXPECT_NEAR(counts[2], 0.2 * draws, 300);
  EXPECT_EQ(counts[3], 0);
}

TEST(DrawToken, TopKAndZeroTemperatureKeepTheLikeliest) {
  const std::vector<float> logits{0.0F, 3.0F, 2.9F, 3.0F};
  EXPECT_EQ(draw_token(logits, {}, {.temperature = 0.0}, {5}), 1);
  for (std::uint64_t i = 0; i < 200; ++i) {
    const std::int32_t token = draw_token(logits, {}, {.temperature = 5.0, .top_k = 2, .seed = 1}, {i});
    EXPECT_TRUE(token == 1 || token == 3);
  }
}

TEST(DrawToken, RefusesLogitsThatHaveNoOrderOrNoSum) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const double temperature : {0.0, 1.0}) {
    EXPECT_THROW(draw_token(std::vector{0.0F, nan, 1.0F}, {}, {.temperature = temperature}, {5}), InputError);
    EXPECT_THROW(draw_token(std::vector{0.0F, INFINITY}, {}, {.temperature = temperature}, {5}), InputError);
    EXPECT_THROW(draw_token(std::vector{-INFINITY, -INFINITY}, {}, {.temperature = temperature}, {5}), InputError);
  }
}

TEST(DrawToken, TopPKeepsTheLikeliestOfThatShare) {
  const std::vector<float> logits{std::log(0.1F), std::log(0.45F), std::log(0.2F), std::log(0.25F)};
  std::map<std::int32_t, int> counts;
  for (std::uint64_t i = 0; i < 4000; ++i) {
    ++counts[draw_token(logits, {}, {.temperature = 1.0, .top_p = 0.6, .seed = 3}, {i})];
  }
  EXPECT_EQ(counts.size(), 2U);  // 0.45 is less than 0.6, with 0.25 it is more
  EXPECT_NEAR(counts[1], 4000 * 0.45 / 0.7, 130);
  EXPECT_EQ(draw_token(logits, {}, {.temperature = 1.0, .top_p = 0.01, .seed = 3}, {0}), 1);  // one is left at least
}

TEST(DrawToken, ARepetitionPenaltyWeakensTokensThatAreThere) {
  const DrawOptions options{.temperature = 0.0, .repetition_penalty = 2.0};
  const std::vector<std::int32_t> sequence{1, 1};
  EXPECT_EQ(draw_token(std::vector{1.5F, 2.0F, -1.0F}, sequence, options, {}), 0);    // 2 becomes 1, once
  EXPECT_EQ(draw_token(std::vector{-1.5F, -1.0F, -3.0F}, sequence, options, {}), 0);  // -1 becomes -2
}

TEST(DrawToken, AmongManyTokensFollowsTheProbabilitiesToo) {
  std::vector<float> logits(5000, std::log(0.5F / 4999.0F));
  logits[4321] = std::log(0.5F);
  int likeliest = 0;
  for (std::uint64_t i = 0; i < 2000; ++i) {
    likeliest += draw_token(logits, {}, {.temperature = 1.0, .seed = 5}, {i}) == 4321 ? 1 : 0;
  }
  EXPECT_NEAR(likeliest, 1000, 90);
}

TEST(DrawToken, APromptThatIsGivenAgainGetsOtherDraws) {
  const std::vector<float> logits(1000, 0.0F);
  const DrawOptions options{.temperature = 1.0};
  EXPECT_NE(draw_token(logits, {}, options, {.token = 3, .repeat = 0}),
            draw_token(logits, {}, options, {.token = 3, .repeat = 1}));
}

std::string streamed(TextStream& stream, const std::vector<std::int32_t>& tokens) {
  std::string text;
  for (const std::int32_t token : tokens) text += stream.next(token) + "|";
  return text + stream.end();
}

TEST(ByteCodec, HoldsBackCharactersUntilTheyAreWhole) {
  const auto codec = byte_codec();
  EXPECT_EQ(streamed(*codec->stream({}), bytes("a\xc3\xa9\xe2\x82\xac")), "a||\xc3\xa9|||\xe2\x82\xac|");
  EXPECT_EQ(streamed(*codec->stream({}), bytes("\xe2\x82")), "||\\xe2\\x82");
  EXPECT_EQ(streamed(*codec->stream({}), bytes("\xe2x\xff")), "|\\xe2x|\\xff|");
}

std::string passed(StopFilter filter, const std::vector<std::string>& pieces) {
  std::string text;
  for (const std::string& piece : pieces) text += filter.pass(piece) + "|";
  return text + filter.rest() + (filter.stopped() ? "." : "");
}

TEST(StopFilter, CutsTheTextBeforeTheFirstStop) {
  EXPECT_EQ(passed(StopFilter({"User:", "\n\n"}), {"a", "b User", ": c", "d"}), "a|b |||.");
  EXPECT_EQ(passed(StopFilter({"User:", "\n\n"}), {"a Us", "e it\n", "x"}), "a |Use it|\nx|");
  EXPECT_EQ(passed(StopFilter({"aab"}), {"aa", "ab", "c"}), "|a||.");
  EXPECT_EQ(passed(StopFilter({"later", "b"}), {"a b later"}), "a |.");
  EXPECT_EQ(passed(StopFilter({"xy"}), {"ax"}), "a|x");
  EXPECT_EQ(passed(StopFilter({" 13 19"}, /*at_end=*/true), {" 13", " 198", " 13", " 19"}), "| 13 198|||.");
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
