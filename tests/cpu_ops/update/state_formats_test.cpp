// State in fewer bytes: `split` is `fp32` to the bit, `bf16_moments` and `byte_moments` round without bias, and every
// instruction set, cut and thread count gives the same, in the format of Lion too.
#include "cpu_ops/reference/reference.hpp"
#include "cpu_ops/update/update_kernels.hpp"
#include "tests/cpu_ops/op_testing.hpp"
#include "tests/cpu_ops/update/stored_state.hpp"

namespace tandem::testing {
namespace {

const AdamW format_adamw{.beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.1};
constexpr std::uint64_t format_seed = 0x9876543210fedcbaULL;

AdamCoefficients coefficients(std::int64_t step) {
  return numerics::adam_coefficients(format_adamw, step, 1e-3, 0.5, true, format_seed);
}

/// Unit of AdamPiece::index, the place of random bits: a piece begins at a multiple of it.
std::uint64_t index_unit(StateFormat format) {
  return format == StateFormat::byte_moments ? static_cast<std::uint64_t>(coded_record) : 1;
}

TEST(SplitState, IsFp32StateToTheBit) {
  for (const std::size_t n : {1UL, 22UL, 55UL, 100003UL}) {
    Stored whole(StateFormat::fp32, n, 3), split(StateFormat::split, n, 3);
    for (int step = 1; step <= 3; ++step) {
      adamw_with(best_isa(), whole.piece(), coefficients(step));
      adamw_with(best_isa(), split.piece(), coefficients(step));
    }
    EXPECT_EQ(split.m, whole.m);
    EXPECT_EQ(split.v, whole.v);
    EXPECT_EQ(split.weight, whole.weight);
    for (std::size_t i = 0; i < n; ++i) ASSERT_EQ(split.master_bits(i), whole.master_bits(i)) << i;
  }
}

TEST(SplitState, HoldsEveryFiniteMaster) {
  Random random(5);
  for (int i = 0; i < 1'000'000; ++i) {
    const float master = numerics::bits_float(random.bits());
    if (!std::isfinite(master)) continue;
    const float joined = numerics::join_master(numerics::weight_of_master(master), numerics::master_residual(master));
    ASSERT_EQ(numerics::float_bits(joined), numerics::float_bits(master));
  }
}

/// Training with fp32 weights gives the bits of fp32 state, but for what is rounded: gradients that are bf16 numbers
/// leave the same bits.
TEST(Fp32Weights, AreTheMasterToTheBit) {
  for (const std::size_t n : {1UL, 22UL, 55UL, 64UL, 100003UL}) {
    Stored expected(StateFormat::fp32, n, 3);
    std::vector<float> gradient(n);
    for (std::size_t i = 0; i < n; ++i) gradient[i] = numerics::bf16_to_float(expected.gradient[i]);
    const Stored start = expected;
    for (int step = 1; step <= 3; ++step) adamw_with(best_isa(), expected.piece(), coefficients(step));
    for (const Isa isa : supported_isas()) {
      Stored actual = start;
      AdamPiece p;
      p.state = {nullptr, actual.m.data(), actual.v.data()};
      p.count = static_cast<std::int64_t>(n);
      p.format = StateFormat::fp32_weights;
      p.fp32_gradient = gradient.data();
      p.fp32_weight = actual.master.data();
      for (int step = 1; step <= 3; ++step) {  // in two pieces
        AdamPiece head = p;
        head.count = p.count / 3;
        adamw_with(isa, head, coefficients(step));
        adamw_with(isa, p.from(head.count), coefficients(step));
      }
      EXPECT_EQ(actual.master, expected.master) << name_of(isa);
      EXPECT_EQ(actual.m, expected.m) << name_of(isa);
      EXPECT_EQ(actual.v, expected.v) << name_of(isa);
    }
  }
}

/// Sums and norms of fp32 gradients that are bf16 numbers are those of the bf16 numbers.
TEST(Fp32Weights, GradientsAreMeasuredAsBf16OnesAre) {
  const Stored s(StateFormat::fp32, 5000, 9);
  std::vector<float> gradient(s.gradient.size()), sum(gradient.size(), 0.25F), sum_expected = sum;
  std::transform(s.gradient.begin(), s.gradient.end(), gradient.begin(), numerics::bf16_to_float);
  std::vector<double> norms(5), expected(5);
  const auto count = static_cast<std::int64_t>(gradient.size());
  const auto threads = arenas()[1];
  const auto kernels = make_host_update_kernels(threads);
  kernels->norm_blocks(s.gradient.data(), count, expected.data());
  kernels->norm_blocks(gradient.data(), count, norms.data());
  EXPECT_EQ(norms, expected);
  for (const bool first : {true, false}) {
    kernels->accumulate(sum.data(), gradient.data(), first, count);
    kernels->accumulate(sum_expected.data(), s.gradient.data(), first, count);
    EXPECT_EQ(sum, sum_expected);
  }
}

class StateFormats : public ::testing::TestWithParam<StateFormat> {};

TEST_P(StateFormats, EveryInstructionSetGivesTheFormulasBits) {
  for (const std::size_t n : {1UL, 22UL, 55UL, 64UL, 1024UL, 100003UL}) {
    for (const std::uint64_t index : {0UL, 1UL, 63UL, 64UL, 1UL << 33, (1UL << 38) - 32}) {
      Stored start(GetParam(), n, 4);
      start.index = index * index_unit(GetParam());
      Stored expected = start;
      reference::adamw(expected.piece(), coefficients(7));
      for (const Isa isa : supported_isas()) {
        Stored actual = start;
        adamw_with(isa, actual.piece(), coefficients(7));
        EXPECT_TRUE(actual == expected) << name_of(isa) << ", " << n << " from " << index;
      }
    }
  }
}

/// Equal bits, or both not a number: which of several NaN an operation passes on is the instruction's affair.
bool same(std::uint32_t a, std::uint32_t b) { return a == b || (numerics::is_nan_bits(a) && numerics::is_nan_bits(b)); }

TEST_P(StateFormats, EveryInstructionSetGivesTheFormulasBitsForAnyBits) {
  Stored start(GetParam(), 64 * 1024, 12);
  Random random(13);
  for (std::size_t i = 0; i < start.master.size(); ++i) {
    const auto any = [&](std::uint32_t else_bits) { return i % 50 < 40 ? else_bits : random.bits(); };
    // The last one is a case of its own: its weight and residual join to a signalling NaN whose quiet form rounds up to
    // -0.
    constexpr std::uint32_t special[] = {0x7f800000, 0xff800000, 0x7f7fffff, 0x00000001, 0x7fffffff, 0x7fc0ffff};
    start.master[i] =
        numerics::bits_float(i % 50 == 49 ? special[i / 50 % 6] : any(numerics::float_bits(start.master[i])));
    start.m16[i].bits = static_cast<std::uint16_t>(any(std::uint32_t{start.m16[i].bits} << 16) >> 16);
    start.v16[i].bits = static_cast<std::uint16_t>(any(std::uint32_t{start.v16[i].bits} << 16) >> 16);
    start.m[i] = numerics::bf16_to_float(start.m16[i]);
    start.v[i] = numerics::bf16_to_float(start.v16[i]);
    start.gradient[i].bits = static_cast<std::uint16_t>(any(std::uint32_t{start.gradient[i].bits} << 16) >> 16);
    start.weight[i] = numerics::weight_of_master(start.master[i]);
    start.residual[i] = numerics::master_residual(start.master[i]);
  }
  for (std::size_t i = 0; i < start.m8.size(); ++i) {
    if (random.below(4) == 0) start.m8[i] = static_cast<std::uint8_t>(random.bits());
    if (random.below(4) == 0) start.v8[i] = static_cast<std::uint8_t>(random.bits());
  }
  Stored expected = start;
  reference::adamw(expected.piece(), coefficients(7));
  const auto wide = [](bf16 x) { return std::uint32_t{x.bits} << 16; };
  for (const Isa isa : supported_isas()) {
    Stored actual = start;
    adamw_with(isa, actual.piece(), coefficients(7));
    EXPECT_EQ(actual.m8, expected.m8) << name_of(isa);  // codes hold no payload of a NaN
    EXPECT_EQ(actual.v8, expected.v8) << name_of(isa);
    for (std::size_t i = 0; i < start.master.size(); ++i) {
      ASSERT_TRUE(same(wide(actual.weight[i]), wide(expected.weight[i]))) << name_of(isa) << i;
      ASSERT_TRUE(same(actual.master_bits(i), expected.master_bits(i))) << name_of(isa) << i;
      ASSERT_TRUE(same(numerics::float_bits(actual.m[i]), numerics::float_bits(expected.m[i]))) << name_of(isa) << i;
      ASSERT_TRUE(same(numerics::float_bits(actual.v[i]), numerics::float_bits(expected.v[i]))) << name_of(isa) << i;
      ASSERT_TRUE(same(wide(actual.m16[i]), wide(expected.m16[i]))) << name_of(isa) << i;
      ASSERT_TRUE(same(wide(actual.v16[i]), wide(expected.v16[i]))) << name_of(isa) << i;
    }
  }
}

TEST_P(StateFormats, ThreadsAndCutsChangeNothing) {
  const Stored start(GetParam(), 300007, 6);
  Stored expected = start;
  reference::adamw(expected.piece(), coefficients(2));
  for (const auto& arena : arenas()) {
    const auto kernels = make_host_update_kernels(arena);
    for (const std::int64_t cut : {std::int64_t{0}, 4 * layout_quantum, std::int64_t{12345}}) {
      if (cut % coded_record != 0 && GetParam() == StateFormat::byte_moments) continue;
      Stored actual = start;
      AdamPiece first = actual.piece();
      first.count = cut;
      kernels->adamw(first, coefficients(2));
      kernels->adamw(actual.piece().from(cut), coefficients(2));
      EXPECT_TRUE(actual == expected) << cut;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, StateFormats, ::testing::ValuesIn(state_formats));

// Every moment is one of the two neighbours of what fp32 would hold; over many elements the errors cancel: their
// mean, in units of the last place, is within four standard errors of zero, where rounding down would be at -0.5.
TEST(Bf16Moments, AreRoundedToANeighbourWithoutBias) {
  constexpr std::size_t n = 200'000;
  Stored whole(StateFormat::fp32, n, 8), rounded(StateFormat::bf16_moments, n, 8);
  adamw_with(best_isa(), whole.piece(), coefficients(3));
  adamw_with(best_isa(), rounded.piece(), coefficients(3));
  const auto bias = [&](const std::vector<float>& exact, const std::vector<bf16>& stored) {
    double sum = 0.0;
    for (std::size_t i = 0; i < n; ++i) {
      const double apart = (static_cast<double>(stored[i].bits) * 65536.0 - numerics::float_bits(exact[i])) / 65536.0;
      EXPECT_LT(std::abs(apart), 1.0) << i;
      sum += apart;
    }
    return sum / static_cast<double>(n);
  };
  const double four_standard_errors = 4.0 * 0.5 / std::sqrt(static_cast<double>(n));
  EXPECT_LT(std::abs(bias(whole.m, rounded.m16)), four_standard_errors);
  EXPECT_LT(std::abs(bias(whole.v, rounded.v16)), four_standard_errors);
  EXPECT_EQ(rounded.weight, whole.weight) << "the first update sees exact moments";
}

/// Both moments of byte_moments as fp32.
struct Decoded {
  explicit Decoded(const Stored& s) : m(s.m.size()), v(s.v.size()) {
    decode_moments(StateArray::m, s.m8.data(), 0, m);
    decode_moments(StateArray::v, s.v8.data(), 0, v);
  }
  std::vector<float> m, v;
};

/// Direction in which each moment was rounded: -1 for down, 1 for up, 0 for neither, each times the probability of the
/// other.
std::vector<double> rounded(const std::vector<float>& exact, const std::vector<float>& stored) {
  std::vector<double> apart(exact.size());
  for (std::size_t i = 0; i < exact.size(); ++i) {
    const double x = std::abs(static_cast<double>(exact[i]));
    // Codes here are an eighth of a power of two apart: what is nearer to zero is another matter.
    const double step = std::ldexp(0.125, std::ilogb(x));
    apart[i] = (std::abs(static_cast<double>(stored[i])) - x) / step;
  }
  return apart;
}

// Moments in bytes are rounded without bias, and whether an element's m is rounded up says little about its v.
TEST(ByteMoments, AreRoundedToANeighbourWithoutBiasAndApart) {
  constexpr std::size_t n = 200'000;
  Stored whole(StateFormat::fp32, n, 8), coded(StateFormat::byte_moments, n, 8);
  const Decoded before(coded);
  whole.m = before.m;
  whole.v = before.v;
  adamw_with(best_isa(), whole.piece(), coefficients(3));
  adamw_with(best_isa(), coded.piece(), coefficients(3));
  EXPECT_EQ(coded.weight, whole.weight) << "the first update sees exact moments";
  const Decoded after(coded);
  const std::vector<double> m = rounded(whole.m, after.m), v = rounded(whole.v, after.v);
  double sum_m = 0.0, sum_v = 0.0, together = 0.0;
  for (std::size_t i = 0; i < n; ++i) {
    ASSERT_LT(std::abs(v[i]), 1.0) << i;
    if (std::abs(whole.m[i]) < 1e-5F) continue;
    ASSERT_LT(std::abs(m[i]), 1.0) << i;
    sum_m += m[i];
    sum_v += v[i];
    together += m[i] * v[i];
  }
  // Bounds on sums of n errors: each error has a variance of at most a quarter, each product of two of at most a
  // sixteenth.
  const double four_standard_errors = 4.0 * 0.5 * std::sqrt(static_cast<double>(n));
  EXPECT_LT(std::abs(sum_m), four_standard_errors);
  EXPECT_LT(std::abs(sum_v), four_standard_errors);
  EXPECT_LT(std::abs(together), 4.0 * 0.25 * std::sqrt(static_cast<double>(n)));
}

/// One gradient of 64 in every other block is larger than the others; all are the same in every step.
void fill_gradients(Stored& s) {
  for (std::size_t i = 0; i < s.gradient.size(); ++i) {
    const bool large = i / 64 % 2 == 0 && i % 64 == 7;
    s.gradient[i] = numerics::round_to_bf16(large ? 3.0F : 0.02F + 1e-4F * static_cast<float>(i % 50));
  }
}

// v moves by a thousandth of the way each step, far less than the distance of two codes, also across powers of two and
// where it is the largest of its block; down again where gradients end.
TEST(ByteMoments, FollowAStepFarSmallerThanTheDistanceOfTwoCodes) {
  constexpr std::size_t n = 64 * 256;
  Stored coded(StateFormat::byte_moments, n, 9);
  std::fill(coded.m8.begin(), coded.m8.end(), std::uint8_t{0});
  std::fill(coded.v8.begin(), coded.v8.end(), std::uint8_t{0});
  Stored whole = coded;
  whole.format = StateFormat::fp32;
  std::fill(whole.m.begin(), whole.m.end(), 0.0F);
  std::fill(whole.v.begin(), whole.v.end(), 0.0F);
  for (Stored* s : {&coded, &whole}) fill_gradients(*s);
  const auto expect_near = [&](const char* when) {
    const Decoded now(coded);
    double v_small = 0.0, v_large = 0.0, expected_small = 0.0, expected_large = 0.0;
    for (std::size_t i = 0; i < n; ++i) {
      const bool large = i / 64 % 2 == 0 && i % 64 == 7;
      (large ? v_large : v_small) += static_cast<double>(now.v[i]);
      (large ? expected_large : expected_small) += static_cast<double>(whole.v[i]);
    }
    // The mean of many is near, each of them is within a third or so.
    EXPECT_NEAR(v_small / expected_small, 1.0, 0.02) << when;
    EXPECT_NEAR(v_large / expected_large, 1.0, 0.06) << when;
  };
  for (int step = 1; step <= 2000; ++step) {
    if (step == 1001) {
      for (Stored* s : {&coded, &whole}) std::fill(s->gradient.begin(), s->gradient.end(), bf16{0});
    }
    for (Stored* s : {&coded, &whole}) adamw_with(best_isa(), s->piece(), coefficients(step));
    if (step == 100) expect_near("at the beginning");
    if (step == 1000) expect_near("where gradients go on");
  }
  expect_near("where they have ended");
}

TEST(Bf16Moments, SeedStepAndPlaceEachDrawOtherBits) {
  const Stored start(StateFormat::bf16_moments, 4096, 9);
  const auto after = [&](std::uint64_t index, const AdamCoefficients& c) {
    Stored s = start;
    s.index = index;
    adamw_with(best_isa(), s.piece(), c);
    return s.v16;
  };
  AdamCoefficients c = coefficients(3);
  const auto expected = after(0, c);
  EXPECT_NE(after(1024, c), expected);
  c.step = 4;
  EXPECT_NE(after(0, c), expected);
  c.step = 3;
  c.seed = format_seed + 1;
  EXPECT_NE(after(0, c), expected);
}

TEST(Bf16Moments, InfinityAndNanStayWhatTheyAre) {
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(numerics::round_stochastically(infinity, 0xffff).bits, 0x7f80);
  EXPECT_EQ(numerics::round_stochastically(-infinity, 0xffff).bits, 0xff80);
  EXPECT_TRUE(numerics::is_nan_bits(std::uint32_t{numerics::round_stochastically(std::nanf(""), 0xffff).bits} << 16));
  EXPECT_EQ(numerics::round_stochastically(1.0F, 0xffff).bits, 0x3f80) << "what bf16 holds is left alone";
}

}  // namespace
}  // namespace tandem::testing
