// Norms on the CPU against their references, whose backward is the derivative.
#include "cpu_ops/kernels/kernels.hpp"
#include "cpu_ops/reference/reference.hpp"
#include "tests/cpu_ops/op_testing.hpp"

namespace tandem::testing {
namespace {

constexpr float eps = 1e-5F;
const Shape norm_shapes[] = {{1, 1}, {111, 24}, {37, 52}, {3, 55}, {22, 201}, {700, 130}};

class Norms : public ::testing::TestWithParam<DType> {};

TEST_P(Norms, LayerNormIsTheReference) {
  for (const Shape& shape : norm_shapes) {
    SCOPED_TRACE(shape.text());
    const Shape rows{shape[0]}, channels{shape[1]};
    Random random(1);
    const Tensor x = random.tensor(GetParam(), shape, 3.0F), w = random.tensor(DType::bf16, channels);
    const Tensor b = random.tensor(DType::bf16, channels);
    for (const bool with_bias : {false, true}) {
      const TensorView bias = with_bias ? b.view() : TensorView{};
      Tensor y_expected(GetParam(), shape), mean_expected(DType::f32, rows), rstd_expected(DType::f32, rows);
      reference::layer_norm(x, w, bias, y_expected, mean_expected, rstd_expected, eps);
      std::vector<Tensor> first;
      for (const auto& arena : arenas()) {
        Tensor y(GetParam(), shape), mean(DType::f32, rows), rstd(DType::f32, rows);
        fast::layer_norm(*arena, x, w, bias, y, mean, rstd, eps);
        EXPECT_CLOSE(y, y_expected);
        EXPECT_CLOSE(mean, mean_expected);
        EXPECT_CLOSE(rstd, rstd_expected);
        if (first.empty()) first = {y, mean, rstd};
        EXPECT_SAME_BITS(y, first[0]);
        EXPECT_SAME_BITS(mean, first[1]);
        EXPECT_SAME_BITS(rstd, first[2]);
      }
    }
  }
}

TEST_P(Norms, LayerNormBackwardIsTheReference) {
  for (const Shape& shape : norm_shapes) {
    SCOPED_TRACE(shape.text());
    const Shape rows{shape[0]}, channels{shape[1]};
    Random random(2);
    const Tensor x = random.tensor(GetParam(), shape, 3.0F), w = random.tensor(DType::bf16, channels);
    const Tensor dy = random.tensor(GetParam(), shape), dx_before = random.tensor(GetParam(), shape);
    const Tensor dw_before = random.tensor(DType::f32, channels), db_before = random.tensor(DType::f32, channels);
    Tensor y(GetParam(), shape), mean(DType::f32, rows), rstd(DType::f32, rows);
    reference::layer_norm(x, w, {}, y, mean, rstd, eps);
    for (const bool accumulate : {false, true}) {
      Tensor dx_expected = dx_before, dw_expected = dw_before, db_expected = db_before;
      reference::layer_norm_backward(dy, x, w, mean, rstd, dx_expected, accumulate, dw_expected, db_expected);
      std::vector<Tensor> first;
      for (const auto& arena : arenas()) {
        Tensor dx = dx_before, dw = dw_before, db = db_before;
        fast::layer_norm_backward(*arena, dy, x, w, mean, rstd, dx, accumulate, dw, db);
        EXPECT_CLOSE(dx, dx_expected);
        EXPECT_CLOSE(dw, dw_expected);
        EXPECT_CLOSE(db, db_expected);
        if (first.empty()) first = {dx, dw, db};
        EXPECT_SAME_BITS(dx, first[0]);
        EXPECT_SAME_BITS(dw, first[1]);
        EXPECT_SAME_BITS(db, first[2]);
        Tensor alone = dx_before;  // frozen weight and bias
        fast::layer_norm_backward(*arena, dy, x, w, mean, rstd, alone, accumulate, {}, {});
        EXPECT_SAME_BITS(alone, dx);
      }
    }
  }
}

TEST_P(Norms, RmsNormForwardAndBackwardAreTheReference) {
  for (const Shape& shape : norm_shapes) {
    SCOPED_TRACE(shape.text());
    const Shape rows{shape[0]}, channels{shape[1]};
    Random random(3);
    const Tensor x = random.tensor(GetParam(), shape, 3.0F), values = random.tensor(DType::bf16, channels);
    const Tensor dy = random.tensor(GetParam(), shape), dw_before = random.tensor(DType::f32, channels);
    for (const auto& [accumulate, offset] : {std::pair{false, 0.0F}, {true, 0.0F}, {false, 1.0F}, {true, 1.0F}}) {
      const NormWeight w(values, offset);
      Tensor y_expected(GetParam(), shape), rstd(DType::f32, rows);
      reference::rms_norm(x, w, y_expected, rstd, eps);
      Tensor dx_expected = dy, dw_expected = dw_before;
      reference::rms_norm_backward(dy, x, w, rstd, dx_expected, accumulate, dw_expected);
      std::vector<Tensor> first;
      for (const auto& arena : arenas()) {
        Tensor y(GetParam(), shape), r(DType::f32, rows), dx = dy, dw = dw_before;
        fast::rms_norm(*arena, x, w, y, r, eps);
        EXPECT_CLOSE(y, y_expected);
        EXPECT_CLOSE(r, rstd);
        // dx takes the memory of dy where it overwrites, as the contract allows.
        fast::rms_norm_backward(*arena, accumulate ? dy : dx, x, w, rstd, dx, accumulate, dw);
        // A lone channel is normalised to its sign: the gradient is what rounding leaves of zero.
        if (shape[1] > 1) EXPECT_CLOSE(dx, dx_expected);
        EXPECT_CLOSE(dw, dw_expected);
        if (first.empty()) first = {y, r, dx, dw};
        EXPECT_SAME_BITS(y, first[0]);
        EXPECT_SAME_BITS(r, first[1]);
        EXPECT_SAME_BITS(dx, first[2]);
        EXPECT_SAME_BITS(dw, first[3]);
      }
    }
  }
}

/// d(sum dy y)/dx by central differences: the references' backwards are derivatives of their forwards.
TEST(NormReference, BackwardsAreDerivatives) {
  const Shape shape{2, 9};
  Random random(4);
  Tensor x = random.tensor(DType::f32, shape);
  const Tensor w = random.tensor(DType::bf16, {9}), dy = random.tensor(DType::f32, shape);
  for (const auto& [centred, offset] : {std::pair{false, 0.0F}, {false, 1.0F}, {true, 0.0F}}) {
    Tensor y(DType::f32, shape), mean(DType::f32, {2}), rstd(DType::f32, {2}), dx(DType::f32, shape);
    const auto loss = [&, centred = centred, offset = offset] {
      if (centred) {
        reference::layer_norm(x, w, {}, y, mean, rstd, eps);
      } else {
        reference::rms_norm(x, {w, offset}, y, rstd, eps);
      }
      double sum = 0.0;
      for (std::int64_t i = 0; i < y.count(); ++i) sum += y.get(i) * dy.get(i);
      return sum;
    };
    loss();
    if (centred) {
      reference::layer_norm_backward(dy, x, w, mean, rstd, dx, false, {}, {});
    } else {
      reference::rms_norm_backward(dy, x, {w, offset}, rstd, dx, false, {});
    }
    for (std::int64_t i = 0; i < x.count(); ++i) {
      const float value = static_cast<float>(x.get(i)), step = 1.0F / 128;
      x.set(i, value + step);
      const double above = loss();
      x.set(i, value - step);
      const double below = loss();
      x.set(i, value);
      EXPECT_NEAR((above - below) / 2 / static_cast<double>(step), dx.get(i), 2e-3) << centred << ' ' << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Activations, Norms, ::testing::Values(DType::f32, DType::bf16), dtype_name);

}  // namespace
}  // namespace tandem::testing
