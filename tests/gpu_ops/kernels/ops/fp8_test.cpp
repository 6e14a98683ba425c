// Matrices of eight-bit floating point by GPU kernels: the reference's numbers to the bit, as they lie and transposed,
// and products that are those of the numbers.
#include "core/numerics/fp8_scale.hpp"
#include "cpu_ops/reference/reference.hpp"
#include "gpu_ops/base/fp8_matrix.hpp"
#include "tests/gpu_ops/kernels/bench.hpp"

namespace tandem::testing {
namespace {

using numerics::E4m3;
using numerics::E5m2;

class Fp8Kernel : public ::testing::TestWithParam<Fp8Format> {
 protected:
  void SetUp() override {
    if (const std::string why = bench().why_not(); !why.empty()) GTEST_SKIP() << why;
    if (!bench().ops().has_fp8()) GTEST_SKIP() << "the card has no products of eight-bit factors";
  }
};

/// A matrix on the device.
struct OnDevice {
  OnDevice(const Tensor& x, Fp8Sums sums, Fp8Format format, std::size_t offset = 0)
      : from(bench().put(x, offset)),
        memory(bench().put(Tensor(DType::f32, {bytes_of(x, sums) / 4}))),
        view{memory.view().data, x.view().shape[0], x.view().shape[1], sums, format} {
    bench().ops().quantize(from, view, bench().stream());
  }
  static std::int64_t bytes_of(const Tensor& x, Fp8Sums sums) {
    return static_cast<std::int64_t>(bench().ops().fp8_bytes(x.view().shape[0], x.view().shape[1], sums));
  }
  /// Numbers of the codes, (R, C), as they lie or from where they lie transposed.
  Tensor numbers(bool transposed) const {
    const Tensor all = bench().get(memory);
    const gpu::Fp8Parts parts = gpu::parts_of({all.view().data, view.rows, view.columns, view.sums, view.format});
    Tensor values(DType::bf16, {view.rows, view.columns});
    for (std::int64_t r = 0; r < view.rows; ++r) {
      for (std::int64_t c = 0; c < view.columns; ++c) {
        const std::uint8_t code = transposed ? parts.transposed[c * view.rows + r] : parts.codes[r * view.columns + c];
        const float number =
            view.format == Fp8Format::e4m3 ? numerics::fp8_to_float<E4m3>(code) : numerics::fp8_to_float<E5m2>(code);
        values.set(r * view.columns + c, number * *parts.scale);
      }
    }
    return values;
  }
  Operand from, memory;
  Fp8Matrix view;
};

TEST_P(Fp8Kernel, IsTheReferenceToTheBitEitherWay) {
  for (const Shape& shape : {Shape{16, 16}, Shape{48, 80}, Shape{272, 144}}) {
    for (const auto& [type, deviation] : {std::pair{DType::bf16, 1.0F},
                                          {DType::bf16, 1e-6F},
                                          {DType::bf16, 1e30F},
                                          {DType::bf16, 1e-38F},
                                          {DType::f32, 1.0F},
                                          {DType::f32, 1e-9F}}) {
      Random random(5);
      const Tensor x = random.tensor(type, shape, deviation);
      Tensor expected(DType::bf16, shape);
      reference::quantize(x, GetParam(), expected);
      for (const std::size_t offset : offsets(type)) {
        const auto results = under_all_schedules([&] {
          const OnDevice both(x, Fp8Sums::both, GetParam(), offset), columns(x, Fp8Sums::columns, GetParam(), offset),
              rows(x, Fp8Sums::rows, GetParam(), offset);
          return std::vector<Tensor>{both.numbers(false), both.numbers(true), columns.numbers(false),
                                     rows.numbers(true)};
        });
        for (const Tensor& numbers : results) EXPECT_SAME_BITS(numbers, expected) << shape.text() << deviation;
      }
    }
  }
}

TEST_P(Fp8Kernel, OneElementThatIsNotFiniteMakesAllNaN) {
  Random random(6);
  Tensor x = random.tensor(DType::bf16, {64, 272});
  x.set(64 * 272 - 1, std::numeric_limits<float>::infinity());
  const Tensor numbers = OnDevice(x, Fp8Sums::both, GetParam()).numbers(true);
  for (std::int64_t i = 0; i < numbers.count(); ++i) ASSERT_TRUE(std::isnan(numbers.get(i))) << i;
}

/// Forward with bias and without, the gradient of the input added up, that of the weight in both types.
TEST_P(Fp8Kernel, ProductsAreThoseOfTheNumbers) {
  constexpr std::int64_t n = 80, in = 144, out = 112;
  Random random(11);
  const Tensor x = random.tensor(DType::bf16, {n, in}), w = random.tensor(DType::bf16, {out, in}, 0.05F);
  const Tensor dy = random.tensor(DType::bf16, {n, out}, 1e-3F), bias = random.tensor(DType::bf16, {out});
  const Tensor residual = random.tensor(DType::bf16, {n, out}), before = random.tensor(DType::bf16, {n, in}, 1e-3F);
  const Tensor sums = random.tensor(DType::f32, {out, in}, 1e-3F);
  Tensor x8(DType::bf16, {n, in}), w8(DType::bf16, {out, in}), dy8(DType::bf16, {n, out});
  reference::quantize(x, Fp8Format::e4m3, x8);
  reference::quantize(w, Fp8Format::e4m3, w8);
  reference::quantize(dy, GetParam(), dy8);
  Tensor y(DType::bf16, {n, out}), y_sum = y, dx = before, dw = sums, narrow(DType::bf16, {out, in});
  reference::linear(x8, w8, bias, y);
  Tensor bare(DType::f32, {n, out});
  reference::linear(x8, w8, {}, bare);
  for (std::int64_t i = 0; i < y_sum.count(); ++i) y_sum.set(i, static_cast<float>(bare.get(i) + residual.get(i)));
  reference::linear_backward_input(dy8, w8, dx, true);
  reference::linear_backward_weight(dy8, x8, dw, {});
  reference::linear_backward_weight(dy8, x8, narrow, {});
  bench().lend({.tokens = n, .sequence = n, .vocabulary = 1, .channels = in, .activations = DType::bf16});
  const auto results = under_all_schedules([&] {
    Ops& ops = bench().ops();
    const StreamView s = bench().stream();
    const OnDevice qx(x, Fp8Sums::both, Fp8Format::e4m3), qw(w, Fp8Sums::both, Fp8Format::e4m3);
    const OnDevice qdy(dy, Fp8Sums::both, GetParam());
    const Tensor empty(DType::bf16, {n, out}), empty_dw(DType::bf16, {out, in});
    const Operand b = bench().put(bias), r = bench().put(residual), to_y = bench().put(empty),
                  to_sum = bench().put(empty);
    const Operand to_dx = bench().put(before), to_dw = bench().put(sums), to_narrow = bench().put(empty_dw);
    ops.fp8_linear(qx.view, qw.view, Fp8Accumulation::full, b, {}, to_y, s);
    ops.fp8_linear(qx.view, qw.view, Fp8Accumulation::full, {}, r, to_sum, s);
    ops.fp8_backward_input(qdy.view, qw.view, Fp8Accumulation::full, to_dx, true, s);
    ops.fp8_backward_weight(qdy.view, qx.view, Fp8Accumulation::full, to_dw, s);
    ops.fp8_backward_weight(qdy.view, qx.view, Fp8Accumulation::full, to_narrow, s);
    return std::vector<Tensor>{bench().get(to_y), bench().get(to_sum), bench().get(to_dx), bench().get(to_dw),
                               bench().get(to_narrow)};
  });
  EXPECT_WITHIN(results[0], y, DType::bf16, false);
  EXPECT_WITHIN(results[1], y_sum, DType::bf16, false);
  EXPECT_WITHIN(results[2], dx, DType::bf16, false);
  EXPECT_WITHIN(results[3], dw, DType::bf16, false);
  EXPECT_WITHIN(results[4], narrow, DType::bf16, false);
}

INSTANTIATE_TEST_SUITE_P(Formats, Fp8Kernel, ::testing::Values(Fp8Format::e4m3, Fp8Format::e5m2),
                         [](const auto& of) { return of.param == Fp8Format::e4m3 ? "e4m3" : "e5m2"; });

}  // namespace
}  // namespace tandem::testing
