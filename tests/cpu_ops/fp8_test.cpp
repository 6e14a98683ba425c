// Matrices of eight-bit floating point on the CPU: the reference's elements to the bit, whatever their size, and
// products that are those of the numbers they stand for.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "core/numerics/fp8_scale.hpp"
#include "core/ops/op_checks.hpp"
#include "cpu_ops/kernels/kernels.hpp"
#include "cpu_ops/reference/reference.hpp"
#include "tests/cpu_ops/op_testing.hpp"

namespace tandem::testing {
namespace {

class Fp8Op : public ::testing::TestWithParam<Fp8Format> {};

Fp8Matrix matrix_over(Tensor& memory, Fp8Format format) {
  const Shape shape = memory.view().shape;
  return {memory.view().data, shape[0], shape[1], Fp8Sums::both, format};
}

void expect_as_reference(const Tensor& x, Fp8Format format, const std::string& what) {
  Tensor expected(DType::bf16, x.view().shape);
  reference::quantize(x, format, expected);
  for (const auto& arena : arenas()) {
    Tensor values(DType::bf16, x.view().shape);
    fast::quantize(*arena, x, matrix_over(values, format));
    EXPECT_SAME_BITS(values, expected) << what;
  }
}

/// Deviations from those whose squares are no numbers of fp32 to those whose elements are denormal, and more elements
/// than a thread takes.
TEST_P(Fp8Op, IsTheReferenceToTheBit) {
  for (const float deviation : {1e38F, 1e20F, 3.0F, 1.0F, 1e-3F, 1e-20F, 1e-30F, 1e-37F, 1e-39F}) {
    Random random(7);
    for (const DType type : {DType::bf16, DType::f32}) {
      expect_as_reference(random.tensor(type, {48, 80}, deviation), GetParam(), std::to_string(deviation));
    }
  }
  Random random(8);
  expect_as_reference(random.tensor(DType::bf16, {512, 272}), GetParam(), "large");
  expect_as_reference(Tensor(DType::bf16, {16, 16}), GetParam(), "zeros");
}

/// The largest element becomes the largest number of the format, or one of the binade below it, never more.
TEST_P(Fp8Op, TheLargestDecidesTheScale) {
  for (std::uint16_t bits = 1; bits < 0x7f80; bits = static_cast<std::uint16_t>(bits + 3)) {
    Tensor x(DType::bf16, {16, 16}), values(DType::bf16, {16, 16});
    x.view().as<bf16>()[77] = bf16{static_cast<std::uint16_t>(bits | 0x8000u)};
    fast::quantize(*arenas()[0], x, matrix_over(values, GetParam()));
    const double before = -x.get(77), after = -values.get(77);
    ASSERT_TRUE(std::isfinite(after)) << bits;
    if (before < 1e-25 || before > 2.97e38) continue;  // range in which the scale is not clamped
    const double step = GetParam() == Fp8Format::e4m3 ? 1.0 / 16 : 1.0 / 8;
    ASSERT_NEAR(after, before, step * before) << bits;
  }
}

TEST_P(Fp8Op, OneElementThatIsNotFiniteMakesAllNaN) {
  for (const float bad : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                          std::numeric_limits<float>::quiet_NaN()}) {
    Random random(9);
    Tensor x = random.tensor(DType::bf16, {64, 1040});
    x.set(64 * 1040 - 1, bad);
    expect_as_reference(x, GetParam(), "not finite");
    Tensor values(DType::bf16, {64, 1040});
    fast::quantize(*arenas()[1], x, matrix_over(values, GetParam()));
    for (std::int64_t i = 0; i < values.count(); ++i) ASSERT_TRUE(std::isnan(values.get(i))) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, Fp8Op, ::testing::Values(Fp8Format::e4m3, Fp8Format::e5m2),
                         [](const auto& of) { return of.param == Fp8Format::e4m3 ? "e4m3" : "e5m2"; });

TEST(Fp8Checks, RefuseWhatDoesNotFit) {
  Tensor memory(DType::bf16, {32, 48}), y(DType::bf16, {32, 32}), odd(DType::bf16, {32, 24});
  Fp8Matrix x{memory.view().data, 32, 48, Fp8Sums::columns, Fp8Format::e4m3};
  const Fp8Matrix w = x;
  EXPECT_NO_THROW(checks::fp8_linear(x, w, {}, {}, y));
  EXPECT_THROW(checks::fp8_linear(x, w, {}, {}, odd), MisuseError);
  EXPECT_THROW(checks::quantize(odd, {memory.view().data, 32, 24, Fp8Sums::columns, Fp8Format::e4m3}), MisuseError);
  EXPECT_THROW(checks::fp8_backward_weight(x, w, memory), MisuseError);  // summed over columns alone
  x.format = Fp8Format::e5m2;
  EXPECT_NO_THROW(checks::fp8_linear(x, w, {}, {}, y));
  Fp8Matrix other = w;
  other.format = Fp8Format::e5m2;
  EXPECT_THROW(checks::fp8_linear(x, other, {}, {}, y), MisuseError);
  EXPECT_THROW(checks::fp8_linear(x, w, {}, Tensor(DType::f32, {32, 32}), y), MisuseError);
  other = w;
  other.data = nullptr;
  EXPECT_THROW(checks::fp8_linear(x, other, {}, {}, y), MisuseError);
}

}  // namespace
}  // namespace tandem::testing
