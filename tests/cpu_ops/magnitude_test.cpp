// Magnitudes that operations write beside their results: those of the elements as they lie in memory, the results' bits
// as without, for every number of threads; and matrices quantized by them.
#include <gtest/gtest.h>

#include <functional>

#include "cpu_ops/kernels/kernels.hpp"
#include "tests/cpu_ops/magnitudes.hpp"
#include "tests/cpu_ops/op_testing.hpp"

namespace tandem::testing {
namespace {

class MagnitudeOp : public ::testing::TestWithParam<DType> {};

/// Runs `op`, which writes two results at most, with magnitudes and without, and compares.
void expect_magnitudes(const Shape& shape, DType type, const std::string& what,
                       const std::function<void(Parallel&, MeasuredView, MeasuredView)>& op) {
  for (const auto& arena : arenas()) {
    Tensor a(type, shape), b(type, shape), plain_a(type, shape), plain_b(type, shape);
    // The magnitude that an earlier tensor has left is no part of it.
    std::uint32_t of_a = 0x7fffffffu, of_b = of_a;
    op(*arena, {a, &of_a}, {b, &of_b});
    op(*arena, plain_a, plain_b);
    EXPECT_SAME_BITS(a, plain_a) << what;
    EXPECT_SAME_BITS(b, plain_b) << what;
    EXPECT_EQ(of_a, magnitude_of(a)) << what << " " << shape.text();
    if (of_b == 0x7fffffffu) continue;
    EXPECT_EQ(of_b, magnitude_of(b)) << what << " " << shape.text();
  }
}

TEST_P(MagnitudeOp, IsThatOfTheResult) {
  for (const Shape& shape : {Shape{1, 1}, Shape{3, 22}, Shape{5, 55}, Shape{1, 100003}, Shape{700, 80}}) {
    for (const Values& values : all_values()) {
      const NormOperands of(values, GetParam(), shape);
      const Tensor &x = of.x, &up = of.up, &dy = of.dy, &w = of.weight;
      Tensor mean(DType::f32, {shape[0]}), rstd(DType::f32, {shape[0]});
      const auto expect = [&](const char* op, const auto& run) {
        expect_magnitudes(shape, GetParam(), std::string(op) + " of " + values.name, run);
      };
      using Out = const MeasuredView&;
      expect("layer_norm", [&](Parallel& p, Out y, Out) { fast::layer_norm(p, x, w, w, y, mean, rstd, 1e-5F); });
      expect("rms_norm", [&](Parallel& p, Out y, Out) { fast::rms_norm(p, x, NormWeight(w, 1.0F), y, rstd, 1e-5F); });
      expect("gelu", [&](Parallel& p, Out y, Out) { fast::gelu(p, x, y); });
      expect("gelu_backward", [&](Parallel& p, Out dx, Out) { fast::gelu_backward(p, dy, x, dx); });
      expect("swiglu", [&](Parallel& p, Out y, Out) { fast::swiglu(p, x, up, y); });
      expect("geglu", [&](Parallel& p, Out y, Out) { fast::geglu(p, x, up, y); });
      expect("swiglu_backward", [&](Parallel& p, Out g, Out u) { fast::swiglu_backward(p, dy, x, up, g, u); });
      expect("geglu_backward", [&](Parallel& p, Out g, Out u) { fast::geglu_backward(p, dy, x, up, g, u); });
    }
  }
}

TEST_P(MagnitudeOp, QuantizesAsAPassOfItsOwnDoes) {
  for (const Fp8Format format : {Fp8Format::e4m3, Fp8Format::e5m2}) {
    for (const Values& values : all_values()) {
      const Shape shape{272, 336};
      Random random(3);
      const Tensor x = values.tensor(random, GetParam(), shape);
      for (const auto& arena : arenas()) {
        std::uint32_t magnitude = 0x7fffffffu;
        fast::measure(*arena, {x, &magnitude});
        EXPECT_EQ(magnitude, magnitude_of(x)) << values.name;
        Tensor with(DType::bf16, shape), without(DType::bf16, shape);
        fast::quantize(*arena, {x, &magnitude}, {with.view().data, 272, 336, Fp8Sums::both, format});
        fast::quantize(*arena, x, {without.view().data, 272, 336, Fp8Sums::both, format});
        EXPECT_SAME_BITS(with, without) << values.name;
        EXPECT_EQ(magnitude, magnitude_of(x)) << "it is only read";
      }
    }
  }
}

/// A magnitude of another tensor gives other bits: it is what decides.
TEST_P(MagnitudeOp, IsWhatDecidesTheScale) {
  Random random(4);
  const Tensor x = random.tensor(GetParam(), {16, 32});
  std::uint32_t wrong = magnitude_of(x) - (4u << 23), infinite = 0x7f800000u;
  Tensor right(DType::bf16, {16, 32}), other = right, none = right;
  const auto to = [](const Tensor& t) { return Fp8Matrix{t.view().data, 16, 32, Fp8Sums::both, Fp8Format::e4m3}; };
  fast::quantize(*arenas()[0], x, to(right));
  fast::quantize(*arenas()[0], {x, &wrong}, to(other));
  fast::quantize(*arenas()[0], {x, &infinite}, to(none));
  EXPECT_NE(right.bytes(), other.bytes());
  for (std::int64_t i = 0; i < none.count(); ++i) ASSERT_TRUE(std::isnan(none.get(i))) << i;
}

INSTANTIATE_TEST_SUITE_P(Types, MagnitudeOp, ::testing::Values(DType::f32, DType::bf16), dtype_name);

}  // namespace
}  // namespace tandem::testing
