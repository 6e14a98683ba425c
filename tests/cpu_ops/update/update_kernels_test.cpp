// AdamW on the CPU against an oracle of its own, bit by bit in each instruction set; planted faults are seen.
#include "cpu_ops/update/update_kernels.hpp"

#include <cstdio>

#include "core/numerics/norm_block.hpp"
#include "cpu_ops/reference/reference.hpp"
#include "tests/cpu_ops/op_testing.hpp"

namespace tandem::testing {
namespace {

constexpr double learning_rate = 3e-4;
const AdamW hyper{.beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1};

struct State {
  std::vector<float> master, m, v;
  std::vector<bf16> gradient, weight;

  explicit State(std::size_t n) : master(n), m(n), v(n), gradient(n), weight(n) {}
  AdamPiece piece() {
    return {
        {master.data(), m.data(), v.data()}, gradient.data(), weight.data(), static_cast<std::int64_t>(master.size())};
  }
  std::size_t size() const { return master.size(); }
};

enum class Gradients { usual, zero, huge, denormal };

State random_state(std::size_t n, Gradients kind, unsigned seed) {
  Random random(seed);
  State s(n);
  const float size = kind == Gradients::huge ? 1e15F : kind == Gradients::denormal ? 1e-39F : 1e-2F;
  for (std::size_t i = 0; i < n; ++i) {
    s.master[i] = random.normal(0.05F);
    s.gradient[i] = numerics::round_to_bf16(kind == Gradients::zero ? 0.0F : random.normal(size));
    s.m[i] = random.normal(1e-2F);
    s.v[i] = 1e-4F + std::abs(random.normal(1e-4F));
  }
  return s;
}

struct Oracle {
  double update, m, v;
};

/// AdamW in double, from the hyperparameters; `update` is new master minus old.
Oracle oracle(const State& s, std::size_t i, std::int64_t step, double scale) {
  const double g = static_cast<double>(numerics::bf16_to_float(s.gradient[i])) * scale;
  const double m = hyper.beta1 * static_cast<double>(s.m[i]) + (1.0 - hyper.beta1) * g;
  const double v = hyper.beta2 * static_cast<double>(s.v[i]) + (1.0 - hyper.beta2) * g * g;
  const double m_hat = m / (1.0 - std::pow(hyper.beta1, static_cast<double>(step)));
  const double v_hat = v / (1.0 - std::pow(hyper.beta2, static_cast<double>(step)));
  const double old = static_cast<double>(s.master[i]);
  return {-learning_rate * (m_hat / (std::sqrt(v_hat) + hyper.eps) + hyper.weight_decay * old), m, v};
}

/// Elements whose update differs from the oracle's. One element may be off by the rounding of its master to
/// fp32 (half a unit in the last place) and 1e-5 of the update: decay alone is 3e-5 of a master, which is
/// hundreds of such units, so nothing that matters hides in it.
std::size_t wrong_elements(const State& before, const State& after, std::int64_t step, double scale) {
  std::size_t wrong = 0;
  for (std::size_t i = 0; i < before.size(); ++i) {
    const Oracle o = oracle(before, i, step, scale);
    const double old = static_cast<double>(before.master[i]), now = static_cast<double>(after.master[i]);
    const double ulp = std::ldexp(std::max(std::abs(old), std::abs(now)), -23);
    const bool update_right = std::abs((now - old) - o.update) <= 1e-5 * std::abs(o.update) + ulp;
    const bool m_right = std::abs(static_cast<double>(after.m[i]) - o.m) <=
                         4e-7 * (std::abs(o.m) + std::abs(static_cast<double>(before.m[i])));
    const bool v_right = std::abs(static_cast<double>(after.v[i]) - o.v) <= 4e-7 * o.v;
    const bool weight_right = after.weight[i] == numerics::weight_of_master(after.master[i]);
    wrong += update_right && m_right && v_right && weight_right ? 0 : 1;
  }
  return wrong;
}

TEST(AdamWUpdate, AgreesWithTheOracleElementByElement) {
  const auto kernels = make_host_update_kernels(arenas()[1]);
  for (const std::size_t n : {1UL, 22UL, 55UL, 100003UL}) {
    for (const std::int64_t step : {1, 2, 1000}) {
      for (const Gradients kind : {Gradients::usual, Gradients::zero, Gradients::huge, Gradients::denormal}) {
        const State before = random_state(n, kind, 7);
        State after = before;
        kernels->adamw(after.piece(), numerics::adam_coefficients(hyper, step, learning_rate, 0.5, true));
        EXPECT_EQ(wrong_elements(before, after, step, 0.5), 0U) << n << " elements, step " << step;
      }
    }
  }
}

TEST(AdamWUpdate, FirstStepFromNothingMovesByTheLearningRate) {
  State s(33);
  for (std::size_t i = 0; i < s.size(); ++i) s.gradient[i] = numerics::round_to_bf16(i % 2 == 0 ? 0.25F : -3.0F);
  adamw_with(best_isa(), s.piece(), numerics::adam_coefficients(hyper, 1, learning_rate, 1.0, true));
  for (std::size_t i = 0; i < s.size(); ++i) {
    EXPECT_NEAR(static_cast<double>(s.master[i]), i % 2 == 0 ? -learning_rate : learning_rate, 1e-6 * learning_rate);
  }
}

/// One thread that says it is eight, and how many bodies it was to run at once.
class CountingParallel final : public Parallel {
 public:
  int threads() const noexcept override { return 8; }
  void run(std::int64_t count, IndexFunction body) override {
    most = std::max(most, count);
    for (std::int64_t i = 0; i < count; ++i) body(i);
  }
  std::int64_t most = 0;
};

TEST(AdamWUpdate, TakesNoMoreThreadsThanItMay) {
  const State before = random_state(3'000'017, Gradients::usual, 11);
  const AdamCoefficients c = numerics::adam_coefficients(hyper, 3, learning_rate, 0.5, true);
  State expected = before;
  const auto counting = std::make_shared<CountingParallel>();
  const auto kernels = make_host_update_kernels(counting);
  kernels->adamw(expected.piece(), c);
  EXPECT_GT(counting->most, 8);
  for (const int threads : {1, 3, 7}) {
    State after = before;
    counting->most = 0;
    kernels->adamw(after.piece(), c, threads);
    EXPECT_EQ(counting->most, threads);
    EXPECT_EQ(after.master, expected.master);
    EXPECT_EQ(after.m, expected.m);
    EXPECT_EQ(after.v, expected.v);
    EXPECT_TRUE(std::equal(after.weight.begin(), after.weight.end(), expected.weight.begin(),
                           [](bf16 a, bf16 b) { return a.bits == b.bits; }));
  }
}

// The checker itself, shown to see what a wrong optimizer does.
class PlantedFault : public ::testing::TestWithParam<std::size_t> {
 protected:
  State before_ = random_state(GetParam(), Gradients::usual, 8);
  State after_ = before_;
  std::size_t found(std::int64_t step) const { return wrong_elements(before_, after_, step, 1.0); }
};

TEST_P(PlantedFault, BiasCorrectionOfAnotherStepIsSeen) {
  adamw_with(Isa::scalar, after_.piece(), numerics::adam_coefficients(hyper, 3, learning_rate, 1.0, true));
  EXPECT_GT(found(2), GetParam() * 9 / 10);
}

TEST_P(PlantedFault, MissingBiasCorrectionIsSeen) {
  AdamCoefficients c = numerics::adam_coefficients(hyper, 2, learning_rate, 1.0, true);
  c.inv_sqrt_correction2 = 1.0F;
  adamw_with(Isa::scalar, after_.piece(), c);
  EXPECT_GT(found(2), GetParam() * 9 / 10);
}

TEST_P(PlantedFault, DroppedWeightDecayIsSeen) {
  adamw_with(Isa::scalar, after_.piece(), numerics::adam_coefficients(hyper, 2, learning_rate, 1.0, false));
  EXPECT_GT(found(2), GetParam() * 9 / 10);
}

TEST_P(PlantedFault, AnUpdateThatDoesNothingIsSeen) { EXPECT_EQ(found(2), GetParam()); }

TEST_P(PlantedFault, AStaleWeightIsSeen) {
  adamw_with(Isa::scalar, after_.piece(), numerics::adam_coefficients(hyper, 2, learning_rate, 1.0, true));
  EXPECT_EQ(found(2), 0U);
  after_.weight = before_.weight;
  EXPECT_GT(found(2), GetParam() * 9 / 10);
}

INSTANTIATE_TEST_SUITE_P(Sizes, PlantedFault, ::testing::Values(1, 22, 55, 100003));

// -- the same bits everywhere -------------------------------------------------------------------------------------

/// A NaN made from several NaNs keeps the payload of one of them, which IEEE leaves open: any NaN will do.
std::uint32_t comparable(float x) { return x != x ? 0x7fc00000u : numerics::float_bits(x); }
std::uint32_t comparable(bf16 x) { return comparable(numerics::bf16_to_float(x)) >> 16; }

template <class T>
void expect_same(const std::vector<T>& actual, const std::vector<T>& expected, const char* what) {
  for (std::size_t i = 0; i < expected.size(); ++i) {
    ASSERT_EQ(comparable(actual[i]), comparable(expected[i])) << what << " " << i;
  }
}

void expect_same(const State& actual, const State& expected) {
  expect_same(actual.master, expected.master, "master");
  expect_same(actual.m, expected.m, "m");
  expect_same(actual.v, expected.v, "v");
  expect_same(actual.weight, expected.weight, "weight");
}

/// Bits without rhyme or reason: every exponent, NaNs, infinities and denormals of both signs.
State random_bits(std::size_t n, unsigned seed) {
  Random random(seed);
  State s(n);
  const auto any = [&] { return numerics::bits_float(random.bits()); };
  const std::uint32_t edges[] = {0u,          0x80000000u, 1u,          0x007fffffu, 0x00800000u, 0x7f7fffffu,
                                 0x7f800000u, 0xff800000u, 0x7fc00000u, 0x7f800001u, 0xffffffffu, 0x3f800000u};
  const auto value = [&] { return random.below(4) == 0 ? numerics::bits_float(edges[random.below(12)]) : any(); };
  for (std::size_t i = 0; i < n; ++i) {
    s.master[i] = value();
    s.m[i] = value();
    s.v[i] = value();
    s.gradient[i] = bf16{static_cast<std::uint16_t>(numerics::float_bits(value()) >> 16)};
  }
  return s;
}

TEST(UpdateBits, EveryInstructionSetGivesTheFormulasBits) {
  const AdamCoefficients c = numerics::adam_coefficients(hyper, 5, learning_rate, 0.7, true);
  for (const std::size_t n : {1UL, 7UL, 22UL, 55UL, 1024UL, 100003UL}) {
    for (const State& start : {random_bits(n, 9), random_state(n, Gradients::denormal, 10)}) {
      State expected = start;
      reference::adamw(expected.piece(), c);
      for (const Isa isa : supported_isas()) {
        SCOPED_TRACE(name_of(isa));
        State actual = start;
        adamw_with(isa, actual.piece(), c);
        expect_same(actual, expected);
      }
    }
  }
}

TEST(UpdateBits, ThreadsAndCutsChangeNothing) {
  const AdamCoefficients c = numerics::adam_coefficients(hyper, 5, learning_rate, 0.7, true);
  const State start = random_state(300007, Gradients::usual, 11);
  State expected = start;
  reference::adamw(expected.piece(), c);
  for (const auto& arena : arenas()) {
    const auto kernels = make_host_update_kernels(arena);
    for (const std::int64_t cut : {std::int64_t{0}, 4 * layout_quantum, std::int64_t{12345}}) {
      State s = start;
      const AdamPiece p = s.piece();
      AdamPiece first = p;
      first.count = cut;
      kernels->adamw(first, c);
      kernels->adamw(p.from(cut), c);
      expect_same(s, expected);
    }
  }
}

TEST(UpdateBits, NormBlocksAreTheFixedTree) {
  for (const std::int64_t n : {1, 22, 31, 33, 1023, 1024, 1025, 100003}) {
    State s = random_state(static_cast<std::size_t>(n), Gradients::usual, 12);
    // Over many orders of magnitude: sums of squares that are closer are exact in fp64, whatever their order.
    for (std::size_t i = 0; i < s.size(); ++i) {
      const float spread = std::ldexp(1.0F, static_cast<int>(i * 2654435761U % 97) - 48);
      s.gradient[i] = numerics::round_to_bf16(numerics::bf16_to_float(s.gradient[i]) * spread);
    }
    // Extremes in every second block, in which they are all that counts.
    for (std::size_t i = 0; i < s.size(); i += 13) {
      if (i / layout_quantum % 2 == 1) s.gradient[i] = numerics::round_to_bf16(i % 2 == 0 ? 3e38F : 1e-40F);
    }
    const std::size_t blocks = static_cast<std::size_t>((n + layout_quantum - 1) / layout_quantum);
    std::vector<double> expected(blocks), actual(blocks);
    reference::norm_blocks(s.gradient.data(), n, expected.data());
    for (const Isa isa : supported_isas()) {
      norm_blocks_with(isa, s.gradient.data(), n, actual.data());
      EXPECT_EQ(std::memcmp(actual.data(), expected.data(), blocks * sizeof(double)), 0) << name_of(isa) << ' ' << n;
    }
    for (const auto& arena : arenas()) {
      make_host_update_kernels(arena)->norm_blocks(s.gradient.data(), n, actual.data());
      EXPECT_EQ(std::memcmp(actual.data(), expected.data(), blocks * sizeof(double)), 0) << n;
    }
  }
}

TEST(UpdateBits, ANonFiniteGradientShowsInItsBlockAlone) {
  State s = random_state(4096, Gradients::usual, 13);
  for (const unsigned bits : {0x7f80u, 0xff80u, 0x7fc0u, 0xffffu}) {
    s.gradient[1500] = bf16{static_cast<std::uint16_t>(bits)};
    for (const Isa isa : supported_isas()) {
      double partial[4];
      norm_blocks_with(isa, s.gradient.data(), 4096, partial);
      for (int b = 0; b < 4; ++b) EXPECT_EQ(std::isfinite(partial[b]), b != 1) << name_of(isa);
    }
  }
}

TEST(UpdateBits, ConversionsAndSumsAreTheFormulas) {
  for (const std::size_t n : {1UL, 22UL, 55UL, 100003UL}) {
    const State start = random_bits(n, 14);
    const auto count = static_cast<std::int64_t>(n);
    State expected = start;
    reference::weights_of_master(start.master.data(), expected.weight.data(), count);
    reference::round(start.m.data(), expected.gradient.data(), count);
    for (const Isa isa : supported_isas()) {
      SCOPED_TRACE(name_of(isa));
      State s = start;
      weights_of_master_with(isa, start.master.data(), s.weight.data(), count);
      EXPECT_EQ(std::memcmp(s.weight.data(), expected.weight.data(), n * 2), 0);
      round_with(isa, start.m.data(), s.gradient.data(), count);
      EXPECT_EQ(std::memcmp(s.gradient.data(), expected.gradient.data(), n * 2), 0);
      for (const bool first : {true, false}) {
        std::vector<float> sum = start.v, sum_expected = start.v;
        reference::accumulate(sum_expected.data(), start.gradient.data(), first, count);
        accumulate_with(isa, sum.data(), start.gradient.data(), first, count);
        expect_same(sum, sum_expected, "sum");
      }
    }
    State s = start;
    const auto kernels = make_host_update_kernels(arenas()[1]);
    kernels->weights_of_master(start.master.data(), s.weight.data(), count);
    EXPECT_EQ(std::memcmp(s.weight.data(), expected.weight.data(), n * 2), 0);
    kernels->round(start.m.data(), s.gradient.data(), count);
    EXPECT_EQ(std::memcmp(s.gradient.data(), expected.gradient.data(), n * 2), 0);
  }
}

TEST(UpdateKernelsErrors, ThreadsAreThoseOfTheArena) {
  EXPECT_EQ(make_host_update_kernels(make_parallel(2))->threads(), 2);
}

}  // namespace
}  // namespace tandem::testing
