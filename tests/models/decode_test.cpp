// Decoding over a cache of keys and values gives the logits of forwards without one, of every family.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "core/base/error.hpp"
#include "tests/models/rig.hpp"

namespace tandem::testing {
namespace {

constexpr double decode_bar = 1e-5;
constexpr std::int64_t positions = 19;  // tokens of the shortest fixture

/// Largest difference in units of the largest value.
double decode_distance(std::span<const float> actual, std::span<const float> expected) {
  if (actual.size() != expected.size()) return INFINITY;
  double most = 0.0, unit = 1e-30;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    const double off = std::abs(static_cast<double>(actual[i]) - static_cast<double>(expected[i]));
    if (!(off <= most)) most = std::isnan(off) ? INFINITY : off;
    unit = std::max(unit, std::abs(static_cast<double>(expected[i])));
  }
  return most / unit;
}

std::vector<std::int32_t> sequence_of(const Fixture& fixture, std::size_t which) {
  std::vector<std::int32_t> tokens;
  for (std::int64_t i = 0; i < positions; ++i) {
    tokens.push_back(
        static_cast<std::int32_t>((5 + 7 * i + 11 * static_cast<std::int64_t>(which)) % fixture.config().vocabulary));
  }
  return tokens;
}

/// Logits of every position by forwards of the whole sequence, without a cache.
std::vector<std::vector<float>> uncached(const Fixture& fixture, const std::vector<std::int32_t>& tokens) {
  Rig rig(fixture, {.batch = 1, .sequence = positions, .training = false});
  rig.set_batch(tokens, std::vector<std::int32_t>(tokens.size(), -1));
  std::vector<std::vector<float>> all;
  for (std::int64_t t = 0; t < positions; ++t) all.push_back(rig.logits(t));
  return all;
}

/// Sequences in the rows of a cache, each at a position of its own.
class Decoding {
 public:
  static constexpr std::int64_t rows = 3, at_once = 5;

  explicit Decoding(const Fixture& fixture)
      : fixture_(fixture),
        rig_(fixture, {.batch = rows, .sequence = at_once, .training = false, .cached = positions}) {}

  struct Step {
    std::size_t sequence;
    std::int64_t first, tokens;
  };
  /// One pass: steps that each take some tokens of a sequence, or, where `decodes`, one token each, together.
  std::vector<std::vector<float>> pass(const std::vector<Step>& steps, bool decodes) {
    Rig::Decoded batch;
    std::vector<CachedPart> parts;
    for (const Step& step : steps) {
      const std::vector<std::int32_t> tokens = sequence_of(fixture_, step.sequence);
      for (std::int64_t i = 0; i < step.tokens; ++i) {
        const std::int64_t place = decodes ? std::ssize(batch.tokens) : i;
        batch.tokens.push_back(tokens[static_cast<std::size_t>(step.first + i)]);
        batch.first.push_back(static_cast<std::int32_t>(place - step.first - i));
        batch.rows.push_back(static_cast<std::int32_t>(rows - 1 - static_cast<std::int64_t>(step.sequence)));
      }
      parts.push_back({step.tokens, false});
    }
    if (decodes) parts = {{std::ssize(steps), true}};
    const std::vector<float> all = rig_.decode(batch, parts);
    const auto width = static_cast<std::ptrdiff_t>(fixture_.config().vocabulary);
    std::vector<std::vector<float>> logits;
    for (auto at = all.begin(); at != all.end(); at += width) logits.emplace_back(at, at + width);
    return logits;
  }
  std::int64_t computed() { return rig_.model().decoded_positions(); }

 private:
  const Fixture& fixture_;
  Rig rig_;
};

class Decode : public ::testing::TestWithParam<std::string> {
 protected:
  Fixture fixture{GetParam()};
};

TEST_P(Decode, GivesTheLogitsOfForwardsWithoutACache) {
  const auto first = uncached(fixture, sequence_of(fixture, 0)), second = uncached(fixture, sequence_of(fixture, 1));
  Decoding decoding(fixture);
  // Prompts of 7 and 3 tokens, the first of them in two parts, then a token of each at a time, and the second alone.
  auto made = decoding.pass({{0, 0, 5}, {1, 0, 3}}, false);
  EXPECT_LE(decode_distance(made.at(0), first[4]), decode_bar);
  EXPECT_LE(decode_distance(made.at(1), second[2]), decode_bar);
  EXPECT_LE(decode_distance(decoding.pass({{0, 5, 2}}, false).at(0), first[6]), decode_bar);
  for (std::int64_t t = 0; t < 12; ++t) {
    made = decoding.pass({{0, 7 + t, 1}, {1, 3 + t, 1}}, true);
    EXPECT_LE(decode_distance(made.at(0), first[static_cast<std::size_t>(7 + t)]), decode_bar) << t;
    EXPECT_LE(decode_distance(made.at(1), second[static_cast<std::size_t>(3 + t)]), decode_bar) << t;
  }
  EXPECT_LE(decode_distance(decoding.pass({{1, 15, 1}}, true).at(0), second[15]), decode_bar);
  EXPECT_EQ(decoding.computed(), 5 + 3 + 2 + 2 * 12 + 1);
}

// A token at a wrong position shows far above the bar: neither the cache nor the rotation is left out.
TEST_P(Decode, AWrongPositionShows) {
  const auto expected = uncached(fixture, sequence_of(fixture, 0));
  Decoding decoding(fixture);
  decoding.pass({{0, 0, 5}}, false);
  decoding.pass({{0, 5, 3}}, false);
  decoding.pass({{0, 9, 1}}, true);  // position 8 holds what was there
  EXPECT_GT(decode_distance(decoding.pass({{0, 10, 1}}, true).at(0), expected[10]), 100 * decode_bar);
}

TEST_P(Decode, ASequenceAloneHasItsBitsAmongOthers) {
  Decoding alone(fixture), among(fixture);
  std::vector<std::vector<float>> expected = alone.pass({{1, 0, 4}}, false);
  auto made = among.pass({{0, 0, 5}, {1, 0, 4}, {2, 0, 2}}, false);
  EXPECT_EQ(made.at(1), expected.at(0));
  for (std::int64_t t = 0; t < 6; ++t) {
    expected = alone.pass({{1, 4 + t, 1}}, true);
    made = among.pass({{2, 2 + t, 1}, {0, 5 + t, 1}, {1, 4 + t, 1}}, true);
    EXPECT_EQ(made.at(2), expected.at(0)) << t;
  }
}

INSTANTIATE_TEST_SUITE_P(Families, Decode, ::testing::ValuesIn(fixture_names()),
                         [](const auto& of) { return of.param; });

TEST(DecodeShapes, RefuseWhatTheyHaveNoRoomFor) {
  const Fixture fixture("llama3");
  const std::vector<CachedPart> six{{6, false}}, four_sequences{{4, true}};
  const Rig::Decoded batch{std::vector<std::int32_t>(6, 1), std::vector<std::int32_t>(6, 0),
                           std::vector<std::int32_t>(6, 0)};
  Rig rig(fixture, {.batch = 3, .sequence = 5, .training = false, .cached = positions});
  EXPECT_THROW(rig.decode(batch, six), MisuseError);
  EXPECT_THROW(rig.decode(batch, four_sequences), MisuseError);
  EXPECT_THROW(Rig(fixture, {.sequence = 5, .cached = positions}), MisuseError);
  EXPECT_THROW(Rig(fixture, {.sequence = 5, .training = false, .cached = fixture.config().positions + 1}), MisuseError);
  Rig plain(fixture, {.sequence = 5, .training = false});
  EXPECT_THROW(plain.model().decode(plain.parameters(), six, plain.stream()), MisuseError);
}

}  // namespace
}  // namespace tandem::testing
