// Updates that may be taken back: they are those of adamw(), and afterwards the state is to the bit what it was, or
// what another update makes of that.
#include <cstring>
#include <limits>
#include <string>

#include "core/numerics/norm_block.hpp"
#include "core/numerics/undo.hpp"
#include "cpu_ops/reference/reference.hpp"
#include "cpu_ops/update/update_kernels.hpp"
#include "tests/cpu_ops/op_testing.hpp"
#include "tests/cpu_ops/update/stored_state.hpp"

namespace tandem::testing {
namespace {

constexpr std::int64_t undo_elements = 2 * undo_run + 3 * layout_quantum;

AdamCoefficients undo_coefficients(std::int64_t step, double scale = 1.0, bool decay = true) {
  return numerics::adam_coefficients({.beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1}, step, 1e-3, scale,
                                     decay, 0x9876543210fedcbaULL);
}

/// State of whole blocks with the record that takes its updates back.
struct Recorded {
  explicit Recorded(const Stored& start)
      : state(start),
        record(undo_bytes(start.format, std::ssize(start.gradient)) + 64),
        norms(start.gradient.size() / layout_quantum) {
    reference::norm_blocks(state.gradient.data(), std::ssize(state.gradient), norms.data());
  }
  UndoPiece undo(std::int64_t begin = 0) {
    const auto address = reinterpret_cast<std::uintptr_t>(record.data());
    return {record.data() + (64 - address % 64) % 64, std::ssize(state.gradient), begin, norms.data()};
  }
  std::int64_t speculate(Isa isa, const AdamCoefficients& c) { return speculate_with(isa, state.piece(), c, undo()); }
  void settle(Isa isa, const AdamCoefficients& speculated, const AdamCoefficients& actual, Settling settling) {
    settle_with(isa, state.piece(), speculated, actual, settling, undo());
  }

  Stored state;
  std::vector<std::byte> record;
  std::vector<double> norms;
};

/// All bits, those of NaN too.
template <class T>
bool same_bytes(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}
bool same_bits(const Stored& a, const Stored& b) {
  return same_bytes(a.master, b.master) && same_bytes(a.m, b.m) && same_bytes(a.v, b.v) &&
         same_bytes(a.residual, b.residual) && same_bytes(a.m16, b.m16) && same_bytes(a.v16, b.v16) &&
         same_bytes(a.m8, b.m8) && same_bytes(a.v8, b.v8) && same_bytes(a.weight, b.weight);
}

/// State that steps with gradients of one distribution have led to.
Stored after_steps(StateFormat format, std::int64_t steps, std::int64_t elements = undo_elements) {
  Stored state(format, static_cast<std::size_t>(elements), 21);
  std::fill(state.m.begin(), state.m.end(), 0.0F);
  std::fill(state.v.begin(), state.v.end(), 0.0F);
  std::fill(state.m16.begin(), state.m16.end(), bf16{});
  std::fill(state.v16.begin(), state.v16.end(), bf16{});
  encode_moments(StateArray::m, state.m, state.m8.data(), 0);
  encode_moments(StateArray::v, state.v, state.v8.data(), 0);
  Random random(22);
  for (std::int64_t step = 1; step <= steps + 1; ++step) {
    for (std::size_t i = 0; i < state.gradient.size(); ++i) {
      state.gradient[i] = numerics::round_to_bf16(i % 7 == 0 ? 0.0F : random.normal(1e-2F));
    }
    if (step <= steps) reference::adamw(state.piece(), undo_coefficients(step));
  }
  return state;
}

class Undo : public ::testing::TestWithParam<StateFormat> {};

/// Whatever is decided afterwards, from `start` on; `c` is of the step that is taken back.
void expect_all_settlings(const Stored& start, const AdamCoefficients& c, const AdamCoefficients& other,
                          const std::string& what) {
  Stored updated = start, updated_otherwise = start;
  reference::adamw(updated.piece(), c);
  reference::adamw(updated_otherwise.piece(), other);
  for (const Isa isa : supported_isas()) {
    Recorded confirmed(start), retracted(start), redone(start);
    confirmed.speculate(isa, c);
    confirmed.settle(isa, c, c, Settling::confirm);
    EXPECT_TRUE(same_bits(confirmed.state, updated)) << what << ", " << name_of(isa);
    retracted.speculate(isa, c);
    retracted.settle(isa, c, c, Settling::retract);
    EXPECT_TRUE(same_bits(retracted.state, start)) << what << ", " << name_of(isa);
    redone.speculate(isa, c);
    redone.settle(isa, c, other, Settling::redo);
    EXPECT_TRUE(same_bits(redone.state, updated_otherwise)) << what << ", " << name_of(isa);
    EXPECT_EQ(recorded_elements(redone.undo(), start.format, undo_elements), 0);
  }
}

TEST_P(Undo, EndsAsDecidedToTheBit) {
  for (const std::int64_t steps : {0, 1, 2, 9}) {
    const Stored start = after_steps(GetParam(), steps);
    expect_all_settlings(start, undo_coefficients(steps + 1), undo_coefficients(steps + 1, 0.3),
                         std::to_string(steps) + " steps before");
    expect_all_settlings(start, undo_coefficients(steps + 1, 1.0, false), undo_coefficients(steps + 1, 0.0, false),
                         std::to_string(steps) + " steps before, without decay");
  }
}

TEST_P(Undo, UpdatesAllBlocksOfATraining) {
  const Stored start = after_steps(GetParam(), 9);
  Stored updated = start;
  reference::adamw(updated.piece(), undo_coefficients(10));
  for (const Isa isa : supported_isas()) {
    Recorded recorded(start);
    EXPECT_EQ(recorded.speculate(isa, undo_coefficients(10)), undo_elements);
    EXPECT_TRUE(same_bits(recorded.state, updated)) << name_of(isa);
    EXPECT_EQ(recorded_elements(recorded.undo(), start.format, undo_elements), undo_elements);
  }
}

/// Gradients of several magnitudes, so that codes, exponents and lists are all used.
TEST_P(Undo, HasTheSameRecordUnderEveryInstructionSet) {
  Stored start = after_steps(GetParam(), 5);
  Random random(26);
  for (std::size_t i = 0; i < start.gradient.size(); ++i) {
    if (i % 31 == 0) start.gradient[i] = numerics::round_to_bf16(random.normal(1.0F));
  }
  const std::size_t bytes = undo_bytes(start.format, undo_elements);
  Recorded reference(start);
  const std::int64_t updated = reference.speculate(Isa::scalar, undo_coefficients(6));
  EXPECT_GT(updated, 0);
  for (const Isa isa : supported_isas()) {
    Recorded recorded(start);
    EXPECT_EQ(recorded.speculate(isa, undo_coefficients(6)), updated);
    EXPECT_EQ(std::memcmp(recorded.undo().memory, reference.undo().memory, bytes), 0) << name_of(isa);
  }
}

/// Moments that have nothing to do with the gradient leave much to keep: what has no room stays as it was.
TEST_P(Undo, LeavesBlocksAloneWhoseRecordHasNoRoom) {
  Stored start(GetParam(), undo_elements, 23);
  Random random(24);
  for (std::size_t i = 0; i < start.gradient.size(); ++i) {
    const bool wild = i / layout_quantum % 3 != 0;
    start.gradient[i] = numerics::round_to_bf16(random.normal(wild ? 1e3F : 1e-2F));
  }
  Recorded recorded(start);
  const std::int64_t updated = recorded.speculate(best_isa(), undo_coefficients(5));
  EXPECT_GT(updated, 0);
  EXPECT_LT(updated, undo_elements);
  EXPECT_EQ(recorded_elements(recorded.undo(), start.format, undo_elements), updated);
  expect_all_settlings(start, undo_coefficients(5), undo_coefficients(5, 1e-3), "gradients far from the moments");
}

TEST_P(Undo, LeavesBlocksAloneWhoseGradientIsNotFinite) {
  Stored start = after_steps(GetParam(), 9);
  start.gradient[5 * layout_quantum + 17].bits = 0x7f80;
  start.gradient[7 * layout_quantum + 1].bits = 0x7fc0;
  Recorded recorded(start);
  EXPECT_EQ(recorded.speculate(best_isa(), undo_coefficients(10)), undo_elements - 2 * layout_quantum);
  recorded.settle(best_isa(), undo_coefficients(10), undo_coefficients(10), Settling::retract);
  EXPECT_TRUE(same_bits(recorded.state, start));
}

/// Equal bits, or both NaN.
bool same_number(float a, float b) {
  return numerics::float_bits(a) == numerics::float_bits(b) || (std::isnan(a) && std::isnan(b));
}

/// `actual` is what an update makes of `start`.
void expect_updated(const Stored& actual, const Stored& start, const AdamCoefficients& c) {
  Stored expected = start;
  reference::adamw(expected.piece(), c);
  const auto master = [](const Stored& s, std::size_t i) { return numerics::bits_float(s.master_bits(i)); };
  for (std::size_t i = 0; i < expected.master.size(); ++i) {
    ASSERT_TRUE(same_number(master(actual, i), master(expected, i))) << i;
    ASSERT_TRUE(same_number(numerics::bf16_to_float(actual.weight[i]), numerics::bf16_to_float(expected.weight[i])))
        << i;
    ASSERT_TRUE(same_number(actual.m[i], expected.m[i]) && same_number(actual.v[i], expected.v[i])) << i;
    ASSERT_TRUE(same_number(numerics::bf16_to_float(actual.m16[i]), numerics::bf16_to_float(expected.m16[i]))) << i;
    ASSERT_TRUE(same_number(numerics::bf16_to_float(actual.v16[i]), numerics::bf16_to_float(expected.v16[i]))) << i;
  }
  EXPECT_EQ(actual.m8, expected.m8);
  EXPECT_EQ(actual.v8, expected.v8);
}

/// Whatever bits state and gradients have.
TEST_P(Undo, TakesBackAnyBits) {
  for (const unsigned share : {1000U, 50U, 2U}) {  // one element in so many has them
    Stored start = after_steps(GetParam(), 3);
    Random random(25);
    const auto is_any = [&] { return random.below(static_cast<std::int32_t>(share)) == 0; };
    constexpr std::uint32_t special[] = {0x7f800000, 0xff800000, 0x7f7fffff, 0x00000001, 0x80000000,
                                         0x7fffffff, 0x7fc0ffff, 0x7f800001, 0xffc00000, 0x00800000};
    const auto any = [&] { return random.below(3) == 0 ? special[random.below(10)] : random.bits(); };
    for (std::size_t i = 0; i < start.master.size(); ++i) {
      if (is_any()) start.master[i] = numerics::bits_float(any());
      if (is_any()) start.m[i] = numerics::bits_float(any());
      if (is_any()) start.v[i] = numerics::bits_float(any());
      if (is_any()) start.m16[i].bits = static_cast<std::uint16_t>(any() >> 16);
      if (is_any()) start.v16[i].bits = static_cast<std::uint16_t>(any() >> 16);
      if (is_any()) start.residual[i] = static_cast<std::uint16_t>(any());
      if (is_any() && start.format != StateFormat::fp32) start.weight[i].bits = static_cast<std::uint16_t>(any() >> 16);
      if (start.format == StateFormat::fp32) start.weight[i] = numerics::weight_of_master(start.master[i]);
      if (is_any()) start.gradient[i].bits = static_cast<std::uint16_t>(any() >> 16);
    }
    for (std::size_t i = 0; i < start.m8.size(); ++i) {
      if (is_any()) start.m8[i] = static_cast<std::uint8_t>(random.bits());
      if (is_any()) start.v8[i] = static_cast<std::uint8_t>(random.bits());
    }
    for (const Isa isa : supported_isas()) {
      Recorded recorded(start);
      const std::int64_t updated = recorded.speculate(isa, undo_coefficients(4));
      EXPECT_LT(updated, undo_elements) << "a block has NaN, and is left alone";
      recorded.settle(isa, undo_coefficients(4), undo_coefficients(4), Settling::retract);
      EXPECT_TRUE(same_bits(recorded.state, start)) << name_of(isa) << ", one in " << share;
      recorded.speculate(isa, undo_coefficients(4));
      recorded.settle(isa, undo_coefficients(4), undo_coefficients(4), Settling::confirm);
      expect_updated(recorded.state, start, undo_coefficients(4));
    }
  }
}

/// Parameters with coefficients of their own share a record.
TEST_P(Undo, HoldsForPiecesOfARange) {
  const Stored start = after_steps(GetParam(), 4);
  const std::int64_t cuts[] = {0, layout_quantum, 70 * layout_quantum, undo_run * 2, undo_elements};
  Stored expected = start;
  Recorded recorded(start);
  for (const Settling settling : {Settling::confirm, Settling::retract}) {
    for (const bool settles : {false, true}) {
      for (std::size_t j = 0; j + 1 < std::size(cuts); ++j) {
        AdamPiece piece = recorded.state.piece().from(cuts[j]);
        piece.count = cuts[j + 1] - cuts[j];
        const AdamCoefficients c = undo_coefficients(5, 1.0, j % 2 == 0);
        if (settles) {
          settle_with(best_isa(), piece, c, c, settling, recorded.undo(cuts[j]));
        } else {
          EXPECT_EQ(speculate_with(best_isa(), piece, c, recorded.undo(cuts[j])), piece.count);
        }
        if (settles && settling == Settling::confirm) {
          AdamPiece part = expected.piece().from(cuts[j]);
          part.count = piece.count;
          reference::adamw(part, c);
        }
      }
    }
    EXPECT_TRUE(same_bits(recorded.state, expected));
  }
}

TEST_P(Undo, IsTheSameOnAnyNumberOfThreads) {
  const Stored start = after_steps(GetParam(), 4);
  Stored updated = start;
  reference::adamw(updated.piece(), undo_coefficients(5));
  for (const auto& threads : arenas()) {
    const auto kernels = make_host_update_kernels(threads);
    for (const int most : {0, 1}) {
      Recorded recorded(start);
      EXPECT_EQ(kernels->speculate(recorded.state.piece(), undo_coefficients(5), recorded.undo(), most), undo_elements);
      EXPECT_TRUE(same_bits(recorded.state, updated));
      kernels->settle(recorded.state.piece(), undo_coefficients(5), undo_coefficients(5), Settling::retract,
                      recorded.undo(), most);
      EXPECT_TRUE(same_bits(recorded.state, start));
    }
  }
}

std::string name_of_format(const ::testing::TestParamInfo<StateFormat>& tested) {
  switch (tested.param) {
    case StateFormat::fp32:
      return "fp32";
    case StateFormat::split:
      return "split";
    case StateFormat::bf16_moments:
      return "bf16_moments";
    default:
      return "byte_moments";
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, Undo, ::testing::ValuesIn(adamw_formats), name_of_format);

/// A hundred million elements of each format under each instruction set.
class UndoAtLength : public ::testing::TestWithParam<StateFormat> {};

TEST_P(UndoAtLength, TakesBackRandomStates) {
  Random random(31);
  for (int round = 0; round < 740; ++round) {
    Stored start(GetParam(), undo_elements, static_cast<unsigned>(round));
    const float scale = std::exp2(static_cast<float>(random.below(24) - 12));
    for (bf16& g : start.gradient) g = numerics::round_to_bf16(random.normal(1e-2F * scale));
    for (const Isa isa : supported_isas()) {
      Recorded recorded(start);
      recorded.speculate(isa, undo_coefficients(round + 1));
      recorded.settle(isa, undo_coefficients(round + 1), undo_coefficients(1), Settling::retract);
      ASSERT_TRUE(same_bits(recorded.state, start)) << name_of(isa) << ", round " << round;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, UndoAtLength, ::testing::ValuesIn(adamw_formats), name_of_format);

/// fp32 weights are their own masters.
TEST(UndoOfFp32Weights, EndsAsDecidedToTheBit) {
  const Stored start = after_steps(StateFormat::fp32, 4);
  std::vector<float> gradient(start.gradient.size());
  std::transform(start.gradient.begin(), start.gradient.end(), gradient.begin(), numerics::bf16_to_float);
  for (const Isa isa : supported_isas()) {
    Recorded recorded(start);
    AdamPiece p;
    p.state = {nullptr, recorded.state.m.data(), recorded.state.v.data()};
    p.count = undo_elements;
    p.format = StateFormat::fp32_weights;
    p.fp32_gradient = gradient.data();
    p.fp32_weight = recorded.state.master.data();
    EXPECT_EQ(speculate_with(isa, p, undo_coefficients(5), recorded.undo()), undo_elements);
    EXPECT_FALSE(same_bits(recorded.state, start));
    settle_with(isa, p, undo_coefficients(5), undo_coefficients(5), Settling::retract, recorded.undo());
    EXPECT_TRUE(same_bits(recorded.state, start)) << name_of(isa);
  }
}

TEST(UndoMistakes, AreRefused) {
  Recorded recorded(after_steps(StateFormat::split, 1));
  const auto with = [&](const AdamW& adamw, double lr) {
    speculate_with(best_isa(), recorded.state.piece(), numerics::adam_coefficients(adamw, 1, lr, 1.0, true),
                   recorded.undo());
  };
  EXPECT_THROW(with({.beta1 = 0.4}, 1e-3), MisuseError);
  EXPECT_THROW(with({.beta2 = 0.4}, 1e-3), MisuseError);
  EXPECT_THROW(with({.weight_decay = 0.6}, 1.0), MisuseError);
  AdamPiece part = recorded.state.piece();
  part.count = 100;
  EXPECT_THROW(speculate_with(best_isa(), part, undo_coefficients(1), recorded.undo()), MisuseError);
  EXPECT_THROW(speculate_with(best_isa(), recorded.state.piece(), undo_coefficients(1), recorded.undo(layout_quantum)),
               MisuseError);
}

}  // namespace
}  // namespace tandem::testing
