// The optimizer's arithmetic on the device: the bits of the CPU's, element by element.
#include <cmath>
#include <cstring>

#include "cpu_ops/reference/reference.hpp"
#include "cpu_ops/update/update_kernels.hpp"
#include "tests/gpu_ops/kernels/bench.hpp"

namespace tandem::testing {
namespace {

constexpr std::int64_t all_counts[] = {1, 22, 55, 1024, 100003};
constexpr std::uint32_t edges[] = {0u,          0x80000000u, 1u,          0x007fffffu, 0x00800000u, 0x7f7fffffu,
                                   0x7f800000u, 0xff800000u, 0x7fc00000u, 0x7f800001u, 0xffffffffu, 0x3f800000u};

/// Bits without rhyme or reason, every exponent among them, and edge values.
Tensor any_bits(Random& random, DType dtype, std::int64_t count) {
  Tensor t(dtype, {count});
  for (std::int64_t i = 0; i < count; ++i) {
    const std::uint32_t bits = random.below(4) == 0 ? edges[random.below(12)] : random.bits();
    if (dtype == DType::f32) {
      t.view().as<float>()[i] = numerics::bits_float(bits);
    } else {
      t.view().as<bf16>()[i] = bf16{static_cast<std::uint16_t>(bits >> 16)};
    }
  }
  return t;
}

/// Same bits, but for NaNs: their payload is open where several meet, and differs between processors.
void expect_same_numbers(const Tensor& actual, const Tensor& expected, const char* what) {
  EXPECT_TRUE(actual.intact()) << what;
  for (std::int64_t i = 0; i < expected.count(); ++i) {
    const float a = static_cast<float>(actual.get(i)), e = static_cast<float>(expected.get(i));
    const bool same = numerics::float_bits(a) == numerics::float_bits(e) || (a != a && e != e);
    ASSERT_TRUE(same) << what << ' ' << i << ": " << a << " for " << e;
  }
}

struct State {
  State(Random& random, std::int64_t count)
      : master(any_bits(random, DType::f32, count)),
        m(any_bits(random, DType::f32, count)),
        v(any_bits(random, DType::f32, count)),
        gradient(any_bits(random, DType::bf16, count)),
        weight(DType::bf16, {count}) {}
  AdamPiece piece() const {
    return {{master.view().as<float>(), m.view().as<float>(), v.view().as<float>()},
            gradient.view().as<bf16>(),
            weight.view().as<bf16>(),
            master.count()};
  }
  Tensor master, m, v, gradient, weight;
};

class UpdateOps : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = bench().why_not(); !why.empty()) GTEST_SKIP() << why;
  }
  Ops& ops() { return bench().ops(); }
};

TEST_F(UpdateOps, AdamWGivesTheBitsOfTheFormulaAndOfEveryInstructionSet) {
  const AdamCoefficients c = numerics::adam_coefficients({}, 5, 3e-4, 0.7, true);
  for (const std::int64_t count : all_counts) {
    for (const std::size_t offset : {0UL, 4UL, 8UL}) {
      SCOPED_TRACE(count);
      Random random(static_cast<unsigned>(count) + 1);
      const State start(random, count);
      State expected = start;
      reference::adamw(expected.piece(), c);
      const auto results = under_all_schedules([&] {
        const Operand master = bench().put(start.master, offset), m = bench().put(start.m, offset);
        const Operand v = bench().put(start.v, offset), gradient = bench().put(start.gradient, offset / 2);
        const Operand weight = bench().put(start.weight, offset / 2);
        ops().adamw({{master.as<float>(), m.as<float>(), v.as<float>()}, gradient.as<bf16>(), weight.as<bf16>(), count},
                    c, bench().stream());
        return std::vector<Tensor>{bench().get(master), bench().get(m), bench().get(v), bench().get(weight)};
      });
      const auto expect_all = [&](const State& s) {
        expect_same_numbers(results[0], s.master, "master");
        expect_same_numbers(results[1], s.m, "m");
        expect_same_numbers(results[2], s.v, "v");
        expect_same_numbers(results[3], s.weight, "weight");
      };
      expect_all(expected);
      for (const Isa isa : supported_isas()) {
        State vectorised = start;
        adamw_with(isa, vectorised.piece(), c);
        expect_all(vectorised);
      }
    }
  }
}

TEST_F(UpdateOps, StateInFewerBytesGivesTheBitsOfTheFormula) {
  const AdamCoefficients c = numerics::adam_coefficients({}, 5, 3e-4, 0.7, true, 0x123456789abcdefULL);
  for (const StateFormat format : {StateFormat::split, StateFormat::bf16_moments, StateFormat::lion}) {
    const DType moments = format == StateFormat::bf16_moments ? DType::bf16 : DType::f32;
    for (const std::int64_t count : all_counts) {
      for (const std::uint64_t index : {0UL, 3UL, 1UL << 33}) {
        SCOPED_TRACE(count);
        Random random(static_cast<unsigned>(count) + 3);
        const auto finite = [&](DType dtype) {
          Tensor t(dtype, {count});
          for (std::int64_t i = 0; i < count; ++i) t.set(i, std::abs(random.normal(0.1F)));
          return t;
        };
        const Tensor master = finite(DType::bf16), weight = finite(DType::bf16), gradient = finite(DType::bf16);
        const Tensor m = finite(moments), v = finite(moments);
        const auto piece = [&](const Tensor& r, const Tensor& mm, const Tensor& vv, const Tensor& w) {
          return AdamPiece{{r.view().data, mm.view().data, vv.view().data},
                           gradient.view().as<bf16>(),
                           w.view().as<bf16>(),
                           count,
                           format,
                           index};
        };
        Tensor r = master, mm = m, vv = v, w = weight;
        reference::adamw(piece(r, mm, vv, w), c);
        const auto results = under_all_schedules([&] {
          const Operand dr = bench().put(master, 0), dm = bench().put(m, 0), dv = bench().put(v, 0);
          const Operand dg = bench().put(gradient, 0), dw = bench().put(weight, 0);
          ops().adamw(
              {{dr.view().data, dm.view().data, dv.view().data}, dg.as<bf16>(), dw.as<bf16>(), count, format, index}, c,
              bench().stream());
          return std::vector<Tensor>{bench().get(dr), bench().get(dm), bench().get(dv), bench().get(dw)};
        });
        EXPECT_SAME_BITS(results[0], r);
        EXPECT_SAME_BITS(results[1], mm);
        EXPECT_SAME_BITS(results[2], vv);
        EXPECT_SAME_BITS(results[3], w);
      }
    }
  }
}

/// Records of moments in a byte each, of any codes and any exponents; as words, which tensors are made of.
Tensor any_records(Random& random, std::int64_t count) {
  Tensor t(DType::f32, {static_cast<std::int64_t>(coded_bytes(count) / sizeof(float))});
  auto* const records = static_cast<std::uint8_t*>(t.view().data);
  for (std::size_t i = 0; i < coded_bytes(count); ++i) records[i] = static_cast<std::uint8_t>(random.bits());
  // Most blocks have an exponent as moments have, and few have any.
  for (std::int64_t i = 0; i < count; i += coded_block) {
    if (random.below(8) != 0) *coded_block_at(records, i).exponent = static_cast<std::uint8_t>(90 + random.below(40));
  }
  return t;
}

TEST_F(UpdateOps, MomentsInAByteAreTheBytesOfTheFormula) {
  const AdamCoefficients c = numerics::adam_coefficients({}, 5, 3e-4, 0.7, true, 0x123456789abcdefULL);
  for (const std::int64_t count : {1, 22, 55, 64, 65, 1024, 1030, 100003}) {
    for (const std::size_t offset : {0UL, 4UL, 8UL}) {
      SCOPED_TRACE(count);
      Random random(static_cast<unsigned>(count) + 4);
      const Tensor residual = any_bits(random, DType::bf16, count), weight = random.tensor(DType::bf16, {count}, 0.1F);
      const Tensor gradient = random.tensor(DType::bf16, {count}, 0.1F);
      const Tensor m = any_records(random, count), v = any_records(random, count);
      const std::uint64_t index = std::uint64_t{1} << 33;
      Tensor r = residual, mm = m, vv = v, w = weight;
      reference::adamw({{r.view().data, mm.view().data, vv.view().data},
                        gradient.view().as<bf16>(),
                        w.view().as<bf16>(),
                        count,
                        StateFormat::byte_moments,
                        index},
                       c);
      const auto results = under_all_schedules([&] {
        const Operand dr = bench().put(residual, offset / 2), dm = bench().put(m, offset), dv = bench().put(v, offset);
        const Operand dg = bench().put(gradient, offset / 2), dw = bench().put(weight, offset / 2);
        ops().adamw({{dr.view().data, dm.view().data, dv.view().data},
                     dg.as<bf16>(),
                     dw.as<bf16>(),
                     count,
                     StateFormat::byte_moments,
                     index},
                    c, bench().stream());
        return std::vector<Tensor>{bench().get(dr), bench().get(dm), bench().get(dv), bench().get(dw)};
      });
      EXPECT_SAME_BITS(results[1], mm);
      EXPECT_SAME_BITS(results[2], vv);
      expect_same_numbers(results[3], w, "weight");
      for (std::int64_t i = 0; i < count; ++i) {
        if (std::isnan(w.get(i))) continue;  // then the residual is part of a payload
        ASSERT_EQ(results[0].view().as<bf16>()[i].bits, r.view().as<bf16>()[i].bits) << i;
      }
    }
  }
}

TEST_F(UpdateOps, MomentsInAByteBeginWithARecord) {
  const AdamPiece within{{}, nullptr, nullptr, 64, StateFormat::byte_moments, 64};
  EXPECT_THROW(ops().adamw(within, {}, bench().stream()), MisuseError);
}

TEST_F(UpdateOps, ConversionsAndSumsGiveTheBitsOfTheFormulas) {
  for (const std::int64_t count : all_counts) {
    for (const std::size_t offset : {0UL, 4UL, 8UL}) {
      Random random(static_cast<unsigned>(count) + 2);
      const Tensor master = any_bits(random, DType::f32, count), gradient = any_bits(random, DType::bf16, count);
      Tensor weight(DType::bf16, {count}), rounded = weight, first = master, next = master;
      reference::weights_of_master(master.view().as<float>(), weight.view().as<bf16>(), count);
      reference::round(master.view().as<float>(), rounded.view().as<bf16>(), count);
      reference::accumulate(first.view().as<float>(), gradient.view().as<bf16>(), true, count);
      reference::accumulate(next.view().as<float>(), gradient.view().as<bf16>(), false, count);
      const auto results = under_all_schedules([&] {
        const Operand from = bench().put(master, offset), g = bench().put(gradient, offset / 2);
        const Operand w = bench().put(Tensor(DType::bf16, {count}), offset / 2);
        const Operand r = bench().put(Tensor(DType::bf16, {count}), offset / 2);
        const Operand sum_first = bench().put(master, offset), sum_next = bench().put(master, offset);
        ops().weights_of_master(from.as<float>(), w.as<bf16>(), count, bench().stream());
        ops().round(from.as<float>(), r.as<bf16>(), count, bench().stream());
        ops().accumulate(sum_first.as<float>(), g.as<bf16>(), true, count, bench().stream());
        ops().accumulate(sum_next.as<float>(), g.as<bf16>(), false, count, bench().stream());
        return std::vector<Tensor>{bench().get(w), bench().get(r), bench().get(sum_first), bench().get(sum_next)};
      });
      // Integer arithmetic on the bits: NaNs too.
      EXPECT_SAME_BITS(results[0], weight);
      EXPECT_SAME_BITS(results[1], rounded);
      EXPECT_SAME_BITS(results[2], first);
      expect_same_numbers(results[3], next, "sum");
    }
  }
}

TEST_F(UpdateOps, NormBlocksAreTheFixedTree) {
  for (const std::int64_t count : {1, 22, 31, 33, 55, 1023, 1024, 1025, 100003}) {
    for (const std::size_t offset : {0UL, 2UL, 8UL}) {
      Random random(12);
      Tensor gradient = random.tensor(DType::bf16, {count}, 1e-2F);
      // Values lie so far apart that sums in another order round otherwise; some in every other block leave nothing
      // else.
      for (std::int64_t i = 0; i < count; ++i) {
        const bool extreme = i % 13 == 0 && i / layout_quantum % 2 == 1;
        const auto scaled = std::ldexp(gradient.get(i), static_cast<int>(i * 37 % 81) - 40);
        gradient.set(i, extreme ? (i % 2 == 0 ? 3e38F : 1e-40F) : static_cast<float>(scaled));
      }
      const std::int64_t blocks = (count + layout_quantum - 1) / layout_quantum;
      std::vector<double> expected(static_cast<std::size_t>(blocks));
      reference::norm_blocks(gradient.view().as<bf16>(), count, expected.data());
      const auto results = under_all_schedules([&] {
        const Operand g = bench().put(gradient, offset);
        const Operand partial = bench().put(Tensor(DType::f32, {2 * blocks}));  // bytes of `blocks` doubles
        ops().norm_blocks(g.as<bf16>(), count, reinterpret_cast<double*>(partial.as<float>()), bench().stream());
        return std::vector<Tensor>{bench().get(partial)};
      });
      EXPECT_EQ(std::memcmp(results[0].view().data, expected.data(), expected.size() * sizeof(double)), 0) << count;
      EXPECT_TRUE(results[0].intact());
    }
  }
}

class UpdateOpsOfFp32Weights : public UpdateOps, public ::testing::WithParamInterface<StateFormat> {};

TEST_P(UpdateOpsOfFp32Weights, AreTheMasterOfTheFormula) {
  const AdamCoefficients c = numerics::adam_coefficients({}, 5, 3e-4, 0.7, true);
  for (const std::int64_t count : all_counts) {
    for (const std::size_t offset : {0UL, 4UL, 8UL}) {
      SCOPED_TRACE(count);
      Random random(static_cast<unsigned>(count) + 5);
      const State start(random, count);
      const Tensor gradient = random.tensor(DType::f32, {count}, 1e-2F);
      Tensor weight = start.master, m = start.m, v = start.v;
      const auto piece = [count](const auto& m_of, const auto& v_of, const auto& g, const auto& w) {
        AdamPiece p;
        p.state = {nullptr, m_of.template as<float>(), v_of.template as<float>()};
        p.count = count;
        p.format = GetParam();
        p.fp32_gradient = g.template as<float>();
        p.fp32_weight = w.template as<float>();
        return p;
      };
      reference::adamw(piece(m.view(), v.view(), gradient.view(), weight.view()), c);
      const auto results = under_all_schedules([&] {
        const Operand dm = bench().put(start.m, offset), dv = bench().put(start.v, offset);
        const Operand g = bench().put(gradient, offset), w = bench().put(start.master, offset);
        ops().adamw(piece(dm, dv, g, w), c, bench().stream());
        return std::vector<Tensor>{bench().get(dm), bench().get(dv), bench().get(w)};
      });
      expect_same_numbers(results[0], m, "m");
      expect_same_numbers(results[1], v, "v");
      expect_same_numbers(results[2], weight, "weight");
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, UpdateOpsOfFp32Weights,
                         ::testing::Values(StateFormat::fp32_weights, StateFormat::lion_fp32_weights));

TEST_F(UpdateOps, Fp32GradientsAreAddedAndMeasuredAsTheyAre) {
  for (const std::int64_t count : {1, 31, 33, 1023, 1024, 1025, 5000}) {
    for (const std::size_t offset : {0UL, 4UL}) {
      Random random(13);
      Tensor gradient = random.tensor(DType::f32, {count}, 1e-2F);
      for (std::int64_t i = 0; i < count; ++i) {
        gradient.set(i, static_cast<float>(std::ldexp(gradient.get(i), static_cast<int>(i * 37 % 81) - 40)));
      }
      const Tensor sum = random.tensor(DType::f32, {count});
      const std::int64_t blocks = (count + layout_quantum - 1) / layout_quantum;
      std::vector<double> norms(static_cast<std::size_t>(blocks));
      reference::norm_blocks(gradient.view().as<float>(), count, norms.data());
      Tensor first = sum, next = sum;
      reference::accumulate(first.view().as<float>(), gradient.view().as<float>(), true, count);
      reference::accumulate(next.view().as<float>(), gradient.view().as<float>(), false, count);
      const auto results = under_all_schedules([&] {
        const Operand g = bench().put(gradient, offset);
        const Operand sum_first = bench().put(sum, offset), sum_next = bench().put(sum, offset);
        const Operand partial = bench().put(Tensor(DType::f32, {2 * blocks}));  // bytes of `blocks` doubles
        ops().accumulate(sum_first.as<float>(), g.as<float>(), true, count, bench().stream());
        ops().accumulate(sum_next.as<float>(), g.as<float>(), false, count, bench().stream());
        ops().norm_blocks(g.as<float>(), count, reinterpret_cast<double*>(partial.as<float>()), bench().stream());
        return std::vector<Tensor>{bench().get(sum_first), bench().get(sum_next), bench().get(partial)};
      });
      EXPECT_SAME_BITS(results[0], first);
      EXPECT_SAME_BITS(results[1], next);
      EXPECT_EQ(std::memcmp(results[2].view().data, norms.data(), norms.size() * sizeof(double)), 0) << count;
      EXPECT_TRUE(results[2].intact());
    }
  }
}

TEST_F(UpdateOps, NothingToDoIsDoneWithoutALaunch) {
  ops().adamw({}, {}, bench().stream());
  for (const StateFormat format :
       {StateFormat::fp32, StateFormat::fp32_weights, StateFormat::lion, StateFormat::lion_fp32_weights}) {
    AdamPiece none;
    none.format = format;
    ops().adamw(none, {}, bench().stream());
  }
  ops().accumulate(nullptr, static_cast<const bf16*>(nullptr), false, 0, bench().stream());
  ops().accumulate(nullptr, static_cast<const float*>(nullptr), false, 0, bench().stream());
  ops().norm_blocks(static_cast<const bf16*>(nullptr), 0, nullptr, bench().stream());
  ops().norm_blocks(static_cast<const float*>(nullptr), 0, nullptr, bench().stream());
}

}  // namespace
}  // namespace tandem::testing
