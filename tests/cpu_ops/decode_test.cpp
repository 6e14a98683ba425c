// Frozen weights in other formats and dropout on the CPU: the bits of the reference, which are those of the formulas.
#include "core/numerics/dropout.hpp"
#include "core/ops/op_checks.hpp"
#include "core/params/weight_encoder.hpp"
#include "core/tensor/coded_shape.hpp"
#include "cpu_ops/kernels/kernels.hpp"
#include "cpu_ops/reference/reference.hpp"
#include "tests/cpu_ops/coded_weights.hpp"

namespace tandem::testing {
namespace {

TEST(Decode, IsTheReferenceToTheBit) {
  for (const WeightCode code : weight_codes) {
    for (const Shape& shape : coded_shapes()) {
      const RandomCodes codes(code, shape, 1);
      Tensor expected(DType::bf16, shape);
      reference::decode(codes.view(), expected);
      for (const auto& arena : arenas()) {
        Tensor weight(DType::bf16, shape);
        fast::decode(*arena, codes.view(), weight);
        EXPECT_SAME_BITS(weight, expected) << static_cast<int>(code) << " of " << shape.text();
      }
    }
  }
}

TEST(Decode, IsWhatRangesAreRoundedOnce) {
  for (const WeightCode code : weight_codes) {
    for (const Shape& shape : coded_shapes()) {
      const RandomCodes codes(code, shape, 2);
      Tensor weight(DType::bf16, shape), expected(DType::bf16, shape);
      fast::decode(*arenas()[0], codes.view(), weight);
      std::vector<float> values(static_cast<std::size_t>(shape.count()));
      decode_range(code, coded_shape(shape), codes.bytes.data(), codes.scales.data(), 0, values);
      for (std::size_t i = 0; i < values.size(); ++i) expected.set(static_cast<std::int64_t>(i), values[i]);
      EXPECT_SAME_BITS(weight, expected) << static_cast<int>(code) << " of " << shape.text();
    }
  }
}

class DropoutOp : public ::testing::TestWithParam<DType> {};

/// More elements than a thread takes, from within a block of random bits and across 2^32.
TEST_P(DropoutOp, IsTheReferenceToTheBitAlsoInPlace) {
  for (const Shape& shape : {Shape{1, 1}, Shape{5, 11}, Shape{3, 1001}, Shape{37, 1000}}) {
    for (const std::uint64_t first : {std::uint64_t{0}, std::uint64_t{7}, (std::uint64_t{1} << 32) - 30}) {
      Random random(3);
      const Tensor x = random.tensor(GetParam(), shape), before = random.tensor(GetParam(), shape);
      const Dropout of{0.3F, 42, 5, first};
      Tensor expected(GetParam(), shape), sum = before;
      reference::dropout(x, of, expected, false);
      reference::dropout(x, of, sum, true);
      for (const auto& arena : arenas()) {
        Tensor y = x, z = before;
        fast::dropout(*arena, y, of, y, false);
        fast::dropout(*arena, x, of, z, true);
        EXPECT_SAME_BITS(y, expected) << shape.text() << " from " << first;
        EXPECT_SAME_BITS(z, sum) << shape.text() << " from " << first;
      }
    }
  }
}

/// The numbers decide, not where an element lies: a part that begins at number n is that part of the whole.
TEST_P(DropoutOp, PartsAreTheWhole) {
  Random random(4);
  const Tensor x = random.tensor(GetParam(), {1, 100});
  Tensor whole(GetParam(), {1, 100}), part(GetParam(), {1, 61});
  reference::dropout(x, {0.5F, 1, 2, 10}, whole, false);
  TensorView rest = x.view();
  rest.data = static_cast<std::byte*>(rest.data) + 39 * size_of(GetParam());
  rest.shape = {1, 61};
  fast::dropout(*arenas()[0], rest, {0.5F, 1, 2, 49}, part, false);
  for (std::int64_t i = 0; i < 61; ++i) EXPECT_EQ(part.get(i), whole.get(39 + i)) << i;
}

INSTANTIATE_TEST_SUITE_P(Activations, DropoutOp, ::testing::Values(DType::f32, DType::bf16), dtype_name);

/// The dropped share of a million elements is within five standard deviations, and what is left is divided by
/// the rest; seeds and streams decide anew.
TEST(Dropout, DropsItsShareAndKeepsTheMean) {
  const Shape shape{1000, 1000};
  Tensor ones(DType::f32, shape);
  for (std::int64_t i = 0; i < ones.count(); ++i) ones.set(i, 1.0F);
  const auto dropped = [&](const Dropout& of) {
    Tensor y(DType::f32, shape);
    fast::dropout(*arenas()[0], ones, of, y, false);
    std::vector<bool> zero(1000000);
    for (std::size_t i = 0; i < zero.size(); ++i) {
      const double value = y.get(static_cast<std::int64_t>(i));
      zero[i] = value == 0.0;
      const double kept = static_cast<double>(static_cast<float>(1.0 / (1.0 - static_cast<double>(of.rate))));
      EXPECT_TRUE(value == 0.0 || value == kept) << value;
    }
    return zero;
  };
  for (const float rate : {0.0F, 0.05F, 0.5F, 0.9F}) {
    const auto zero = dropped({rate, 42, 7, 0});
    const double share = static_cast<double>(std::count(zero.begin(), zero.end(), true)) / 1e6;
    EXPECT_NEAR(share, static_cast<double>(rate),
                5.0 * std::sqrt(static_cast<double>(rate) * (1.0 - static_cast<double>(rate)) / 1e6))
        << rate;
  }
  const auto first = dropped({0.5F, 42, 7, 0});
  for (const auto& other : {dropped({0.5F, 43, 7, 0}), dropped({0.5F, 42, 8, 0}), dropped({0.5F, 42, 7, 1000000})}) {
    int same = 0;
    for (std::size_t i = 0; i < first.size(); ++i) same += first[i] == other[i] ? 1 : 0;
    EXPECT_NEAR(same, 500000, 2500);
  }
}

TEST(Dropout, WhatIsDroppedIsZeroWhateverItWas) {
  Tensor x(DType::f32, {1, 64});
  for (std::int64_t i = 0; i < 64; ++i) x.set(i, i % 2 == 0 ? std::nanf("") : HUGE_VALF);
  Tensor y(DType::f32, {1, 64});
  fast::dropout(*arenas()[0], x, {0.5F, 1, 1, 0}, y, false);
  int zeros = 0;
  for (std::int64_t i = 0; i < 64; ++i) zeros += y.get(i) == 0.0 ? 1 : 0;
  EXPECT_GT(zeros, 10);
  EXPECT_LT(zeros, 54);
}

TEST(CodedOperands, AreRefusedWhereTheyDoNotFit) {
  Tensor x(DType::f32, {2, 3}), other(DType::f32, {3, 2}), weight(DType::bf16, {2, 3}), flat(DType::bf16, {6});
  EXPECT_NO_THROW(checks::dropout(x, {0.5F, 1, 1, 0}, x, false));
  EXPECT_THROW(checks::dropout(x, {0.5F, 1, 1, 0}, x, true), MisuseError);
  EXPECT_THROW(checks::dropout(x, {0.5F, 1, 1, 0}, other, false), MisuseError);
  for (const float rate : {-0.1F, 1.0F, std::nanf("")}) {
    EXPECT_THROW(checks::dropout(x, {rate, 1, 1, 0}, x, false), MisuseError) << rate;
  }
  const RandomCodes codes(WeightCode::int8, {2, 3}, 1);
  EXPECT_NO_THROW(checks::decode(codes.view(), weight));
  EXPECT_THROW(checks::decode(codes.view(), flat), MisuseError);
  EXPECT_THROW(checks::decode(codes.view(), x), MisuseError);
  EXPECT_THROW(checks::decode({WeightCode::none, codes.bytes.data(), codes.scales.data()}, weight), MisuseError);
  EXPECT_THROW(checks::decode({WeightCode::int8, codes.bytes.data(), nullptr}, weight), MisuseError);
}

}  // namespace
}  // namespace tandem::testing
