// The kernels' text beside the CPU's vector instructions: one update, whichever processor makes it. NaNs count as
// equal to each other, since their payload is open.
#include <vector>

#include "cpu_ops/reference/reference.hpp"
#include "cpu_ops/update/update_kernels.hpp"
#include "gpu_ops/base/kernels.hpp"
#include "gpu_ops/emulation/grid.hpp"
#include "tests/cpu_ops/op_testing.hpp"

namespace tandem::testing {
namespace {

struct State {
  explicit State(std::size_t n) : master(n), m(n), v(n), gradient(n), weight(n) {}
  AdamPiece piece() {
    return {
        {master.data(), m.data(), v.data()}, gradient.data(), weight.data(), static_cast<std::int64_t>(master.size())};
  }
  std::vector<float> master, m, v;
  std::vector<bf16> gradient, weight;
};

bool same(float a, float b) { return numerics::float_bits(a) == numerics::float_bits(b) || (a != a && b != b); }
bool same(bf16 a, bf16 b) { return same(numerics::bf16_to_float(a), numerics::bf16_to_float(b)); }

template <class T>
std::size_t differences(const std::vector<T>& a, const std::vector<T>& b) {
  std::size_t count = 0;
  for (std::size_t i = 0; i < a.size(); ++i) count += same(a[i], b[i]) ? 0 : 1;
  return count;
}

/// Elements in which the kernel's update of `start` differs from that of any instruction set of this processor.
std::size_t update_differences(const State& start, const AdamCoefficients& c) {
  State kernel = start;
  gpu::adamw(kernel.piece(), c, nullptr);
  std::size_t count = 0;
  for (const Isa isa : supported_isas()) {
    State cpu = start;
    adamw_with(isa, cpu.piece(), c);
    count += differences(kernel.master, cpu.master) + differences(kernel.m, cpu.m) + differences(kernel.v, cpu.v) +
             differences(kernel.weight, cpu.weight);
  }
  return count;
}

/// The state's masters, m and gradients as those of Lion, whose weights are in fp32.
struct LionWeights {
  explicit LionWeights(const State& s) : master(s.master), m(s.m) {
    for (const bf16 g : s.gradient) gradient.push_back(numerics::bf16_to_float(g));
  }
  AdamPiece piece() {
    AdamPiece p;
    p.state = {nullptr, m.data(), nullptr};
    p.count = static_cast<std::int64_t>(m.size());
    p.format = StateFormat::lion_fp32_weights;
    p.fp32_gradient = gradient.data();
    p.fp32_weight = master.data();
    return p;
  }
  std::vector<float> master, m, gradient;
};

/// update_differences() of Lion.
std::size_t lion_differences(const State& start, const AdamCoefficients& c) {
  LionWeights kernel(start);
  gpu::adamw(kernel.piece(), c, nullptr);
  std::size_t count = 0;
  for (const Isa isa : supported_isas()) {
    LionWeights cpu(start);
    adamw_with(isa, cpu.piece(), c);
    count += differences(kernel.master, cpu.master) + differences(kernel.m, cpu.m);
  }
  return count;
}

const AdamCoefficients coefficients[] = {numerics::adam_coefficients({}, 1, 3e-4, 1.0, true),
                                         numerics::adam_coefficients({}, 5, 3e-4, 0.7, false),
                                         numerics::adam_coefficients({.eps = 0.0}, 100000, 1e-5, 1e-3, true)};

/// Zeros, denormals, smallest and largest, infinities, NaNs of both signs, and three values of every exponent.
std::vector<float> edge_values() {
  std::vector<float> all;
  for (const std::uint32_t bits :
       {0u, 1u, 0x007fffffu, 0x7f7fffffu, 0x7f800000u, 0x7fc00000u, 0x7f800001u, 0x7fffffffu}) {
    for (const std::uint32_t sign : {0u, 0x80000000u}) all.push_back(numerics::bits_float(bits | sign));
  }
  for (std::uint32_t exponent = 0; exponent < 255; ++exponent) {
    for (const std::uint32_t mantissa : {0u, 0x2aaaabu, 0x7fffffu}) {
      all.push_back(numerics::bits_float(exponent << 23 | mantissa | (exponent % 2) << 31));
    }
  }
  return all;
}

TEST(UpdateKernelBits, EdgeValuesOfEveryOperandAgreeWithEveryInstructionSet) {
  const std::vector<float> edges = edge_values();
  Random random(1);
  const auto any = [&] {
    return edges[static_cast<std::size_t>(random.below(static_cast<std::int32_t>(edges.size())))];
  };
  for (const AdamCoefficients& c : coefficients) {
    // Each edge in each operand, the others drawn from the edges; then all gradients there are.
    State s(3 * edges.size() * 8 + 65536);
    for (std::size_t i = 0; i < s.master.size(); ++i) {
      s.master[i] = any();
      s.m[i] = any();
      s.v[i] = any();
      s.gradient[i] = bf16{static_cast<std::uint16_t>(numerics::float_bits(any()) >> 16)};
    }
    for (std::size_t i = 0; i < edges.size() * 8; ++i) {
      s.master[3 * i] = edges[i / 8];
      s.m[3 * i + 1] = edges[i / 8];
      s.v[3 * i + 2] = edges[i / 8];
    }
    for (std::size_t bits = 0; bits < 65536; ++bits) {
      s.gradient[3 * edges.size() * 8 + bits] = bf16{static_cast<std::uint16_t>(bits)};
    }
    EXPECT_EQ(update_differences(s, c), 0U);
    EXPECT_EQ(lion_differences(s, c), 0U);
  }
}

/// `count` random triples of master and moments, any bits, with any gradient.
void expect_random_triples_agree(std::int64_t count, unsigned seed) {
  Random random(seed);
  State s(std::size_t{1} << 20);
  for (std::int64_t done = 0; done < count; done += static_cast<std::int64_t>(s.master.size())) {
    for (std::size_t i = 0; i < s.master.size(); ++i) {
      s.master[i] = numerics::bits_float(random.bits());
      s.m[i] = numerics::bits_float(random.bits());
      s.v[i] = numerics::bits_float(random.bits() & 0x7fffffffu);
      s.gradient[i] = bf16{static_cast<std::uint16_t>(random.bits() >> 16)};
    }
    ASSERT_EQ(update_differences(s, coefficients[static_cast<std::size_t>(done >> 20) % 3]), 0U) << "after " << done;
  }
}

TEST(UpdateKernelBits, AMillionRandomTriplesAgree) { expect_random_triples_agree(1000000, 2); }
TEST(UpdateKernelBitsLong, AHundredMillionRandomTriplesAgree) { expect_random_triples_agree(100000000, 3); }

TEST(UpdateKernelBits, EveryRoundingDecisionOfTheConversionsAgrees) {
  // Every upper half with lower halves around the decision: below, at and above the middle, and the ends.
  std::vector<float> values;
  for (std::uint32_t high = 0; high < 65536; ++high) {
    for (const std::uint32_t low : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      values.push_back(numerics::bits_float(high << 16 | low));
    }
  }
  const auto count = static_cast<std::int64_t>(values.size());
  std::vector<bf16> weights(values.size()), rounded(values.size()), expected(values.size());
  gpu::weights_of_master(values.data(), weights.data(), count, nullptr);
  gpu::round(values.data(), rounded.data(), count, nullptr);
  for (const Isa isa : supported_isas()) {
    weights_of_master_with(isa, values.data(), expected.data(), count);
    EXPECT_EQ(weights, expected) << name_of(isa);
    round_with(isa, values.data(), expected.data(), count);
    EXPECT_EQ(rounded, expected) << name_of(isa);
  }
}

TEST(UpdateKernelBits, TheComparisonSeesOneWrongBit) {
  State s(4096);
  for (std::size_t i = 0; i < s.master.size(); ++i) s.master[i] = s.m[i] = s.v[i] = 1.0F;
  State other = s;
  other.m[4095] = numerics::bits_float(numerics::float_bits(1.0F) + 1);
  EXPECT_EQ(differences(s.m, other.m), 1U);
  AdamCoefficients c = coefficients[0];
  c.one_minus_beta1 = numerics::bits_float(numerics::float_bits(c.one_minus_beta1) + 1);
  State one(4096), two(4096);
  for (std::size_t i = 0; i < 4096; ++i) one.gradient[i] = two.gradient[i] = numerics::round_to_bf16(0.3F);
  gpu::adamw(one.piece(), coefficients[0], nullptr);
  gpu::adamw(two.piece(), c, nullptr);
  EXPECT_EQ(differences(one.m, two.m), 4096U);
}

}  // namespace
}  // namespace tandem::testing
