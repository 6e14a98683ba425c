// Lion's update is Algorithm 2 of arXiv 2302.06675: beside it in double, at the edges of its sign, and with one result
// on every instruction set, whether weights are bf16 or fp32.
#include <array>
#include <limits>
#include <numeric>

#include "cpu_ops/update/update_kernels.hpp"
#include "tests/cpu_ops/op_testing.hpp"

namespace tandem::testing {
namespace {

const AdamW lion_hyperparameters{.beta1 = 0.9, .beta2 = 0.99, .eps = 0.0, .weight_decay = 0.1};

AdamCoefficients lion_coefficients(double lr = 1e-3, double scale = 0.5) {
  return numerics::adam_coefficients(lion_hyperparameters, 1, lr, scale, true);
}

/// State of Lion beside weights in bf16 and, of the same masters, in fp32.
struct LionState {
  explicit LionState(const std::vector<float>& masters)
      : master(masters), m(masters.size()), gradient(m), fp32_m(m), half_gradient(m.size()) {
    for (const float x : masters) {
      weight.push_back(numerics::weight_of_master(x));
      residual.push_back(numerics::master_residual(x));
    }
  }
  void set(std::size_t i, float moment, float bf16_gradient) {
    m[i] = fp32_m[i] = moment;
    gradient[i] = bf16_gradient;
    half_gradient[i] = numerics::round_to_bf16(bf16_gradient);
  }
  std::int64_t count() const { return static_cast<std::int64_t>(m.size()); }
  AdamPiece piece() {
    AdamPiece p;
    p.state = {residual.data(), m.data(), nullptr};
    p.gradient = half_gradient.data();
    p.weight = weight.data();
    p.count = count();
    p.format = StateFormat::lion;
    return p;
  }
  AdamPiece fp32_piece() {
    AdamPiece p;
    p.state = {nullptr, fp32_m.data(), nullptr};
    p.count = count();
    p.format = StateFormat::lion_fp32_weights;
    p.fp32_gradient = gradient.data();
    p.fp32_weight = master.data();
    return p;
  }
  float joined(std::size_t i) const { return numerics::join_master(weight[i], residual[i]); }

  std::vector<float> master, m, gradient, fp32_m;
  std::vector<bf16> half_gradient, weight;
  std::vector<std::uint16_t> residual;
};

/// Updates in pieces, so that ends are at odd places.
void update_in_pieces(Isa isa, const AdamPiece& piece, const AdamCoefficients& c) {
  AdamPiece head = piece;
  head.count = piece.count / 3;
  adamw_with(isa, head, c);
  adamw_with(isa, piece.from(head.count), c);
}

bool alike(float a, float b) {
  return numerics::float_bits(a) == numerics::float_bits(b) || (std::isnan(a) && std::isnan(b));
}

/// Compares both formats with the formula, on every instruction set.
void expect_formula(const LionState& start, const AdamCoefficients& c) {
  for (const Isa isa : supported_isas()) {
    LionState s = start;
    update_in_pieces(isa, s.piece(), c);
    update_in_pieces(isa, s.fp32_piece(), c);
    for (std::size_t i = 0; i < s.m.size(); ++i) {
      const numerics::LionElement next = numerics::lion({start.master[i], start.m[i]}, start.gradient[i], c);
      ASSERT_TRUE(alike(s.joined(i), next.master)) << name_of(isa) << ", " << i;
      ASSERT_TRUE(alike(s.master[i], next.master)) << name_of(isa) << ", " << i;
      ASSERT_TRUE(alike(s.m[i], next.m) && alike(s.fp32_m[i], next.m)) << name_of(isa) << ", " << i;
    }
  }
}

TEST(Lion, EveryInstructionSetGivesTheFormulasBits) {
  for (const std::size_t n : {1UL, 22UL, 55UL, 64UL, 1024UL, 100003UL}) {
    Random random(21);
    std::vector<float> masters(n);
    for (float& x : masters) x = random.normal(0.05F);
    LionState start(masters);
    for (std::size_t i = 0; i < n; ++i) {
      start.set(i, random.normal(1e-2F), numerics::bf16_to_float(numerics::round_to_bf16(random.normal(1e-2F))));
    }
    expect_formula(start, lion_coefficients());
  }
}

TEST(Lion, EveryInstructionSetGivesTheFormulasBitsAtEveryEdge) {
  const float infinity = std::numeric_limits<float>::infinity(), nan = std::nanf("");
  // Each is a bf16 number, so that a gradient may have it; the third and fourth are denormal.
  const std::array edges = {0.0F,      -0.0F,       0x1p-130F, -0x1p-130F, 1.0F, -1.0F, 0x1p-100F,
                            -0x1p-60F, 0x1.fep127F, -infinity, infinity,   nan,  -nan};
  std::vector<float> masters;
  for (const float master : edges) masters.insert(masters.end(), edges.size() * edges.size(), master);
  LionState start(masters);
  for (std::size_t i = 0; i < masters.size(); ++i) {
    start.set(i, edges[i / edges.size() % edges.size()], edges[i % edges.size()]);
  }
  expect_formula(start, lion_coefficients());
  expect_formula(start, lion_coefficients(0.0, 1.0));
}

TEST(Lion, StepsByTheSignAlone) {
  AdamCoefficients c =
      numerics::adam_coefficients({.beta1 = 0.5, .beta2 = 0.75, .weight_decay = 0.0}, 1, 0.25, 1.0, true);
  const auto step = [&](float m, float gradient) { return numerics::lion({2.0F, m}, gradient, c).master; };
  EXPECT_EQ(step(0.0F, 1e-30F), 1.75F);
  EXPECT_EQ(step(0.0F, 0x1p-130F), 1.75F) << "of a denormal one too";
  EXPECT_EQ(step(0.0F, -1e30F), 2.25F);
  EXPECT_EQ(step(0.0F, std::numeric_limits<float>::infinity()), 1.75F);
  EXPECT_EQ(step(0.0F, 0.0F), 2.0F);
  EXPECT_EQ(step(-1.0F, 1.0F), 2.0F) << "where momentum and gradient cancel";
  EXPECT_EQ(step(-3.0F, 1.0F), 2.25F) << "the momentum counts before the gradient is in it";
  EXPECT_TRUE(std::isnan(step(0.0F, std::nanf("")))) << "no step hides it";
  EXPECT_TRUE(std::isnan(step(std::nanf(""), 1.0F)));
  EXPECT_EQ(numerics::lion({2.0F, 3.0F}, 1.0F, c).m, 2.5F);
}

TEST(Lion, KnowsNoStepNumberAndNoEps) {
  AdamW other = lion_hyperparameters;
  other.eps = 1e-3;
  const AdamCoefficients a = lion_coefficients(), b = numerics::adam_coefficients(other, 1000, 1e-3, 0.5, true);
  for (const float gradient : {0.5F, -3.0F, 0.0F}) {
    const numerics::LionElement x = numerics::lion({0.3F, 0.01F}, gradient, a);
    const numerics::LionElement y = numerics::lion({0.3F, 0.01F}, gradient, b);
    EXPECT_EQ(x.master, y.master);
    EXPECT_EQ(x.m, y.m);
  }
}

/// The optimizer as it is usually written in PyTorch, in double: the decay, then the step by the sign of the
/// interpolated momentum, then the momentum.
struct PlainLion {
  double weight, moment = 0.0;
  /// Returns how far the interpolation is from a zero, in units of its larger part.
  double step(double g, double lr) {
    const AdamW& h = lion_hyperparameters;
    weight *= 1.0 - lr * h.weight_decay;
    const double of_moment = h.beta1 * moment, of_gradient = (1.0 - h.beta1) * g, u = of_moment + of_gradient;
    weight -= lr * (u > 0.0 ? 1.0 : u < 0.0 ? -1.0 : 0.0);
    moment = h.beta2 * moment + (1.0 - h.beta2) * g;
    return std::abs(u) / std::max(std::abs(of_moment), std::abs(of_gradient));
  }
};

TEST(Lion, TakesTenStepsAsTheAlgorithmInDouble) {
  constexpr std::size_t n = 5003;
  Random random(31);
  std::vector<float> masters(n);
  for (float& x : masters) x = random.normal(0.05F);
  LionState s(masters);
  std::vector<PlainLion> expected;
  for (const float x : masters) expected.push_back({static_cast<double>(x)});
  std::vector<int> unsure(n);
  constexpr double scale = 0.5;
  for (int step = 1; step <= 10; ++step) {
    const double lr = 1e-3 * step;
    for (std::size_t i = 0; i < n; ++i) {
      s.gradient[i] = numerics::bf16_to_float(numerics::round_to_bf16(random.normal(1e-2F)));
      s.half_gradient[i] = numerics::round_to_bf16(s.gradient[i]);
      // A sum that all but cancels may have another sign in fp32.
      if (expected[i].step(scale * static_cast<double>(s.gradient[i]), lr) < 1e-5) unsure[i] = 1;
    }
    adamw_with(best_isa(), s.piece(), lion_coefficients(lr, scale));
    adamw_with(best_isa(), s.fp32_piece(), lion_coefficients(lr, scale));
  }
  EXPECT_LT(std::accumulate(unsure.begin(), unsure.end(), 0), 5);
  for (std::size_t i = 0; i < n; ++i) {
    if (unsure[i] != 0) continue;
    // A few units in the last place each step; a decay of the wrong value would be off by 1e-7 at least.
    ASSERT_NEAR(static_cast<double>(s.joined(i)), expected[i].weight, 8e-8) << i;
    ASSERT_EQ(s.joined(i), s.master[i]) << i;
    ASSERT_NEAR(static_cast<double>(s.m[i]), expected[i].moment, 2e-9) << i;
  }
}

}  // namespace
}  // namespace tandem::testing
