// Loss of pairs and factors of sequences in the head's gradients, on the CPU against their references.
#include <cmath>
#include <limits>

#include "cpu_ops/kernels/kernels.hpp"
#include "cpu_ops/reference/reference.hpp"
#include "tests/cpu_ops/op_testing.hpp"

namespace tandem::testing {
namespace {

/// Operands of pairs whose margins are of both signs, and so large at the end that a plain sigmoid would be 0 or 1.
struct Pairs {
  explicit Pairs(std::int64_t pairs, std::int64_t length)
      : losses(DType::f32, {2 * pairs, length}),
        reference(DType::f32, {2 * pairs}),
        factors(DType::f32, {2 * pairs}),
        results(DType::f32, {pairs, 3}) {
    Random random(7);
    for (std::int64_t i = 0; i < losses.count(); ++i) losses.set(i, std::abs(random.normal(2.0F)));
    for (std::int64_t i = 0; i < 2 * pairs; ++i) {
      double sum = 0.0;
      for (std::int64_t t = 0; t < length; ++t) sum += losses.get(i * length + t);
      const float spread = i >= 2 * pairs - 2 ? (i % 2 == 0 ? 2000.0F : -2000.0F) : random.normal(9.0F);
      reference.set(i, static_cast<float>(-sum) + spread);
    }
  }
  PreferenceLoss loss() const { return {losses, reference, 0.3F, factors, results}; }
  Tensor losses, reference, factors, results;
};

/// Largest error relative to the value itself, as results lie many binades apart.
double largest_own_error(const Tensor& actual, const Tensor& expected) {
  double largest = 0.0;
  for (std::int64_t i = 0; i < expected.count(); ++i) {
    const double scale = std::max(std::abs(expected.get(i)), 1e-30);
    largest = std::max(largest, std::abs(actual.get(i) - expected.get(i)) / scale);
  }
  return largest;
}

TEST(PreferenceLoss, IsTheReferenceOnAllThreads) {
  for (const auto& [pairs, length] : {std::pair<std::int64_t, std::int64_t>{1, 1}, {3, 55}, {22, 1001}}) {
    SCOPED_TRACE(length);
    const Pairs expected(pairs, length);
    reference::preference_loss(expected.loss());
    Pairs first(pairs, length);
    fast::preference_loss(*arenas()[0], first.loss());
    // Sums are rounded to fp32 once: of some 1,600 nats to 6e-5, of which margins as small as 0.1 are made.
    EXPECT_LT(relative_error(first.results, expected.results), 1e-6);
    EXPECT_LT(relative_error(first.factors, expected.factors), 1e-5);
    EXPECT_TRUE(first.results.intact() && first.factors.intact());
    for (const auto& arena : arenas()) {
      Pairs again(pairs, length);
      fast::preference_loss(*arena, again.loss());
      EXPECT_SAME_BITS(again.results, first.results);
      EXPECT_SAME_BITS(again.factors, first.factors);
    }
  }
}

// With reference and losses that fp32 has exactly, nothing but the last roundings is left.
TEST(PreferenceLoss, LosesNothingOfLargeMargins) {
  const std::vector<float> margins{0.0F, 1e-4F, -1e-4F, 3.0F, -3.0F, 40.0F, -40.0F, 80.0F, 86.0F, -200.0F};
  const auto pairs = static_cast<std::int64_t>(margins.size());
  Tensor losses(DType::f32, {2 * pairs, 1}), reference(DType::f32, {2 * pairs}), factors(DType::f32, {2 * pairs});
  for (std::int64_t i = 0; i < pairs; ++i) reference.set(2 * i, -margins[static_cast<std::size_t>(i)]);
  Tensor results(DType::f32, {pairs, 3}), factors_expected = factors, expected = results;
  reference::preference_loss({losses, reference, 1.0F, factors_expected, expected});
  fast::preference_loss(*arenas()[0], {losses, reference, 1.0F, factors, results});
  EXPECT_LT(largest_own_error(results, expected), 4e-7);
  EXPECT_LT(largest_own_error(factors, factors_expected), 4e-7);
  EXPECT_EQ(results.get(0), static_cast<double>(std::log(2.0F)));
  EXPECT_EQ(factors.get(0), 0.5);
}

TEST(PreferenceLoss, KeepsNaNsToTheirPair) {
  Pairs pairs(3, 5);
  pairs.losses.set(11, std::numeric_limits<float>::quiet_NaN());
  fast::preference_loss(*arenas()[0], pairs.loss());
  for (std::int64_t i = 0; i < 3; ++i) {
    EXPECT_EQ(std::isnan(pairs.results.get(3 * i)), i == 1);
    EXPECT_EQ(std::isnan(pairs.factors.get(2 * i)), i == 1);
  }
}

/// The head with factors of six sequences, one of them 0.
class HeadLossFactors : public ::testing::TestWithParam<DType> {
 protected:
  static constexpr std::int64_t rows = 66, channels = 52, vocabulary = 101;
  HeadLossFactors() {
    const float values[] = {0.5F, -0.5F, 0.0F, -1e-3F, 7.0F, 1.0F};
    for (std::int64_t i = 0; i < 6; ++i) factors_.set(i, values[i]);
    targets_.view().as<std::int32_t>()[1] = -1;
  }
  /// Losses, dx, dweight and rows of tokens.
  struct Results {
    Tensor losses, dx, dweight, rows;
  };
  template <class Compute>
  Results run(DType gradient, bool token_rows, std::int64_t at_once, const Compute& compute) {
    Results r{Tensor(DType::f32, {rows}), Tensor(dtype_, {rows, channels}), Tensor(gradient, {vocabulary, channels}),
              Tensor(DType::f32, {rows, channels})};
    HeadLoss head{.x = x_,
                  .weight = w_,
                  .targets = targets_,
                  .losses = r.losses,
                  .gradient_scale = 0.37F,
                  .dx = r.dx,
                  .dweight = r.dweight,
                  .sequence_factors = factors_,
                  .rows_at_once = at_once};
    if (token_rows) head.tokens = tokens_, head.token_rows = r.rows;
    compute(head);
    return r;
  }
  const DType dtype_ = GetParam();
  Random random_{5};
  const Tensor x_ = random_.tensor(dtype_, {rows, channels}),
               w_ = random_.tensor(DType::bf16, {vocabulary, channels}, 0.3F);
  const Tensor tokens_ = random_.tokens({rows}, 40);
  Tensor targets_ = random_.tokens({rows}, static_cast<std::int32_t>(vocabulary)), factors_{DType::f32, {6}};
};

TEST_P(HeadLossFactors, AreInEveryGradient) {
  struct Case {
    DType gradient;
    bool token_rows;
    std::int64_t at_once;
  };
  for (const Case& c : {Case{DType::f32, false, 0}, Case{DType::bf16, false, 0}, Case{DType::bf16, true, 0},
                        Case{DType::bf16, false, 34}}) {
    SCOPED_TRACE(c.at_once);
    const Results expected =
        run(c.gradient, c.token_rows, c.at_once, [](const HeadLoss& h) { reference::head_loss(h); });
    for (const auto& arena : arenas()) {
      const std::int64_t written = c.gradient == DType::f32 ? 0 : (c.at_once == 0 ? vocabulary : c.at_once);
      LentWorkspace workspace(
          fast::head_loss_scratch(rows, channels, vocabulary, dtype_, arena->threads(), written, c.token_rows));
      const Results made = run(c.gradient, c.token_rows, c.at_once,
                               [&](const HeadLoss& h) { fast::head_loss(*arena, workspace.get(), h); });
      EXPECT_CLOSE(made.losses, expected.losses);
      EXPECT_CLOSE(made.dx, expected.dx);
      EXPECT_CLOSE(made.dweight, expected.dweight);
      EXPECT_CLOSE(made.rows, expected.rows);
      for (std::int64_t i = 0; i < 11 * channels; ++i) ASSERT_EQ(made.dx.get(22 * channels + i), 0.0) << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Activations, HeadLossFactors, ::testing::Values(DType::f32, DType::bf16));

}  // namespace
}  // namespace tandem::testing
