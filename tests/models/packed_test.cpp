// Packed rows against their records, each computed alone.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "tests/models/rig.hpp"

namespace tandem::testing {
namespace {

constexpr double packed_bar = 1e-5;
constexpr std::int64_t sequence = 19;  // the positions of the shortest

struct Record {
  std::int64_t row, first, length;
};
/// Two rows: records of one token, of a few, of more than a window, and of nearly a whole row.
const std::vector<Record> records{{0, 0, 1}, {0, 1, 8}, {0, 9, 3}, {0, 12, 7}, {1, 0, 18}, {1, 18, 1}};

/// Tokens, targets and records of both rows, (B, T) each.
struct Batch {
  std::vector<std::int32_t> tokens, targets, first, end;

  explicit Batch(std::int64_t vocabulary) {
    const auto count = static_cast<std::size_t>(2 * sequence);
    for (std::size_t i = 0; i < count; ++i)
      tokens.push_back(static_cast<std::int32_t>((5 + 7 * i) % static_cast<std::size_t>(vocabulary)));
    targets.resize(count), first.resize(count), end.resize(count);
    for (const Record& record : records) {
      for (std::int64_t t = record.first; t < record.first + record.length; ++t) {
        const auto i = static_cast<std::size_t>(record.row * sequence + t);
        const bool last = t + 1 == record.first + record.length;
        targets[i] = last || i % 5 == 3 ? -1 : tokens[i + 1];
        first[i] = static_cast<std::int32_t>(record.first);
        end[i] = static_cast<std::int32_t>(record.first + record.length);
      }
    }
  }
  std::span<const std::int32_t> part(const std::vector<std::int32_t>& of, const Record& record) const {
    return std::span(of).subspan(static_cast<std::size_t>(record.row * sequence + record.first),
                                 static_cast<std::size_t>(record.length));
  }
};

struct Results {
  std::vector<float> losses;  ///< (B, T)
  Gradients gradients;
};

Results packed(const Fixture& fixture, const Batch& batch, std::int64_t recomputed = 0) {
  Rig rig(fixture, {.batch = 2, .sequence = sequence, .recomputed_blocks = recomputed, .packed = true});
  rig.set_batch(batch.tokens, batch.targets);
  rig.set_records(batch.first, batch.end);
  return {rig.train(fixture.gradient_scale()), rig.gradients()};
}

Results alone(const Fixture& fixture, const Batch& batch) {
  Results sums{std::vector<float>(static_cast<std::size_t>(2 * sequence)), {}};
  for (const Record& record : records) {
    Rig rig(fixture, {.batch = 1, .sequence = record.length});
    rig.set_batch(batch.part(batch.tokens, record), batch.part(batch.targets, record));
    const std::vector<float> losses = rig.train(fixture.gradient_scale());
    std::ranges::copy(losses, sums.losses.begin() + record.row * sequence + record.first);
    for (const auto& [name, values] : rig.gradients()) {
      std::vector<float>& sum = sums.gradients[name];
      sum.resize(values.size());
      std::ranges::transform(sum, values, sum.begin(), std::plus<>());
    }
  }
  return sums;
}

double largest_of(std::span<const float> values) {
  double most = 0.0;
  for (const float x : values) most = std::max(most, std::abs(static_cast<double>(x)));
  return most;
}

/// Largest difference in units of the largest value.
double packed_distance(std::span<const float> actual, std::span<const float> expected) {
  if (actual.size() != expected.size()) return INFINITY;
  double most = 0.0;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    const double off = std::abs(static_cast<double>(actual[i]) - static_cast<double>(expected[i]));
    if (!(off <= most)) most = std::isnan(off) ? INFINITY : off;
  }
  return most / std::max(largest_of(expected), 1e-30);
}

/// Largest distance of a parameter's gradients. Gradients that are nothing but rounding, as of biases that a
/// softmax cancels, are measured by the largest of all.
double packed_distance(const Gradients& actual, const Gradients& expected) {
  double most = 0.0, overall = 0.0;
  for (const auto& [name, values] : expected) overall = std::max(overall, largest_of(values));
  for (const auto& [name, values] : expected) {
    const double own = largest_of(values), unit = std::max(own, 1e-3 * overall) / std::max(own, 1e-30);
    most = std::max(most, packed_distance(actual.at(name), values) / unit);
  }
  return most;
}

class PackedRows : public ::testing::TestWithParam<std::string> {
 protected:
  Fixture fixture{GetParam()};
  Batch batch{fixture.config().vocabulary};
};

TEST_P(PackedRows, HaveTheLossesAndGradientsOfTheirRecordsAlone) {
  const Results expected = alone(fixture, batch), actual = packed(fixture, batch);
  EXPECT_LE(packed_distance(actual.losses, expected.losses), packed_bar);
  EXPECT_LE(packed_distance(actual.gradients, expected.gradients), packed_bar);
}

// A leak across a single boundary, as would be of a record that begins, or ends, a token too late, shows far above the
// bar.
TEST_P(PackedRows, ALeakAcrossABoundaryShows) {
  const Results expected = alone(fixture, batch);
  Batch leaking = batch;
  for (std::size_t t = 9; t < 12; ++t) leaking.first[t] = 8;
  leaking.end[8] = 12;
  const Results actual = packed(fixture, leaking);
  EXPECT_GT(packed_distance(actual.losses, expected.losses), 100 * packed_bar);
  EXPECT_GT(packed_distance(actual.gradients, expected.gradients), 100 * packed_bar);
}

TEST_P(PackedRows, ComputedAgainHaveTheSameBits) {
  const Results kept = packed(fixture, batch), again = packed(fixture, batch, fixture.config().layers);
  EXPECT_EQ(again.losses, kept.losses);
  EXPECT_EQ(again.gradients, kept.gradients);
}

INSTANTIATE_TEST_SUITE_P(Families, PackedRows,
                         ::testing::Values("gpt2", "llama3", "qwen3", "gemma3", "mixtral", "olmo3"),
                         [](const auto& of) { return of.param; });

}  // namespace
}  // namespace tandem::testing
