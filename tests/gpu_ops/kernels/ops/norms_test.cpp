// Norms by GPU kernels against their references.
#include "cpu_ops/reference/reference.hpp"
#include "tests/gpu_ops/kernels/bench.hpp"

namespace tandem::testing {
namespace {

constexpr float eps = 1e-5F;
const Shape norm_shapes[] = {{1, 1},    {111, 24}, {37, 52},  {3, 55},   {22, 201}, {300, 130},
                            {5, 2111}, {70, 264}, {6, 1000}, {5, 3333}, {3, 4104}, {2, 8200}};

class NormOps : public OpsTest {
 protected:
  /// Calls body(shape, offset) for every shape and alignment, with enough workspace.
  template <class Body>
  void everywhere(const Body& body) {
    for (const Shape& shape : norm_shapes) {
      bench().lend({.tokens = shape[0], .channels = shape[1], .activations = dtype()});
      for (const std::size_t offset : offsets(dtype())) {
        SCOPED_TRACE(shape.text() + " at " + std::to_string(offset));
        body(shape, offset);
      }
    }
  }
};

TEST_P(NormOps, LayerNormIsTheReference) {
  everywhere([&](const Shape& shape, std::size_t offset) {
    const Shape rows{shape[0]}, channels{shape[1]};
    Random random(1);
    const Tensor x = random.tensor(dtype(), shape, 3.0F), w = random.tensor(DType::bf16, channels);
    const Tensor b = random.tensor(DType::bf16, channels);
    for (const bool with_bias : {false, true}) {
      Tensor y(dtype(), shape), mean(DType::f32, rows), rstd(DType::f32, rows);
      reference::layer_norm(x, w, with_bias ? b.view() : TensorView{}, y, mean, rstd, eps);
      const auto results = under_all_schedules([&] {
        const Operand in = bench().put(x, offset), weight = bench().put(w), bias = bench().put(b);
        const Operand out = bench().put(Tensor(dtype(), shape), offset), m = bench().put(Tensor(DType::f32, rows));
        const Operand r = bench().put(Tensor(DType::f32, rows));
        ops().layer_norm(in, weight, with_bias ? bias.view() : TensorView{}, out, m, r, eps, stream());
        return std::vector<Tensor>{bench().get(out), bench().get(m), bench().get(r)};
      });
      EXPECT_WITHIN(results[0], y, dtype(), false);
      EXPECT_WITHIN(results[1], mean, dtype(), false);
      EXPECT_WITHIN(results[2], rstd, dtype(), false);
    }
  });
}

TEST_P(NormOps, LayerNormBackwardIsTheReference) {
  everywhere([&](const Shape& shape, std::size_t offset) {
    const Shape rows{shape[0]}, channels{shape[1]};
    Random random(2);
    const Tensor x = random.tensor(dtype(), shape, 3.0F), w = random.tensor(DType::bf16, channels);
    const Tensor dy = random.tensor(dtype(), shape), dx_before = random.tensor(dtype(), shape);
    const Tensor dw_before = random.tensor(DType::f32, channels), db_before = random.tensor(DType::f32, channels);
    Tensor y(dtype(), shape), mean(DType::f32, rows), rstd(DType::f32, rows);
    reference::layer_norm(x, w, {}, y, mean, rstd, eps);
    for (const bool accumulate : {false, true}) {
      Tensor dx_expected = dx_before, dw_expected = dw_before, db_expected = db_before;
      reference::layer_norm_backward(dy, x, w, mean, rstd, dx_expected, accumulate, dw_expected, db_expected);
      const auto results = under_all_schedules([&] {
        const Operand d = bench().put(dy, offset), in = bench().put(x, offset), weight = bench().put(w);
        const Operand m = bench().put(mean), r = bench().put(rstd), dx = bench().put(dx_before, offset);
        const Operand dw = bench().put(dw_before), db = bench().put(db_before), frozen = bench().put(dx_before, offset);
        ops().layer_norm_backward(d, in, weight, m, r, dx, accumulate, dw, db, stream());
        ops().layer_norm_backward(d, in, weight, m, r, frozen, accumulate, {}, {}, stream());
        return std::vector<Tensor>{bench().get(dx), bench().get(dw), bench().get(db), bench().get(frozen)};
      });
      EXPECT_WITHIN(results[0], dx_expected, dtype(), false);
      EXPECT_WITHIN(results[1], dw_expected, dtype(), false);
      EXPECT_WITHIN(results[2], db_expected, dtype(), false);
      EXPECT_SAME_BITS(results[3], results[0]);
    }
  });
}

TEST_P(NormOps, RmsNormForwardAndBackwardAreTheReference) {
  everywhere([&](const Shape& shape, std::size_t offset) {
    const Shape rows{shape[0]}, channels{shape[1]};
    Random random(3);
    const Tensor x = random.tensor(dtype(), shape, 3.0F), values = random.tensor(DType::bf16, channels);
    const Tensor dy = random.tensor(dtype(), shape), dw_before = random.tensor(DType::f32, channels);
    // With something added to the weight, and without: every kernel reads weights in the same way.
    for (const auto& [accumulate, added] : {std::pair{false, 1.0F}, {true, 0.0F}}) {
      const NormWeight w(values, added);
      Tensor y(dtype(), shape), rstd(DType::f32, rows);
      reference::rms_norm(x, w, y, rstd, eps);
      Tensor dx_expected = dy, dw_expected = dw_before;
      reference::rms_norm_backward(dy, x, w, rstd, dx_expected, accumulate, dw_expected);
      const auto results = under_all_schedules([&, accumulate = accumulate, added = added] {
        const Operand in = bench().put(x, offset), weight = bench().put(values),
                      r = bench().put(Tensor(DType::f32, rows));
        const Operand out = bench().put(Tensor(dtype(), shape), offset), dx = bench().put(dy, offset);
        const Operand d = bench().put(dy, offset), dw = bench().put(dw_before);
        ops().rms_norm(in, {weight, added}, out, r, eps, stream());
        // dx takes the memory of dy where it overwrites, as the contract allows.
        ops().rms_norm_backward(accumulate ? d : dx, in, {weight, added}, r, dx, accumulate, dw, stream());
        return std::vector<Tensor>{bench().get(out), bench().get(r), bench().get(dx), bench().get(dw)};
      });
      EXPECT_WITHIN(results[0], y, dtype(), false);
      EXPECT_WITHIN(results[1], rstd, dtype(), false);
      // A lone channel is normalised to its sign: the gradient is what rounding leaves of zero.
      if (shape[1] > 1) {
        EXPECT_WITHIN(results[2], dx_expected, dtype(), false);
      }
      EXPECT_WITHIN(results[3], dw_expected, dtype(), false);
    }
  });
}

/// The rows are so many more than the parts that a warp or a block walks more than it has on their way.
TEST_P(NormOps, BackwardOfManyRowsIsTheReference) {
  for (const Shape& shape : {Shape{8200, 8}, Shape{1100, 264}, Shape{520, 2056}, Shape{520, 4104}}) {
    SCOPED_TRACE(shape.text());
    bench().lend({.tokens = shape[0], .channels = shape[1], .activations = dtype()});
    const Shape rows{shape[0]}, channels{shape[1]};
    Random random(4);
    const Tensor x = random.tensor(dtype(), shape, 3.0F), dy = random.tensor(dtype(), shape);
    const Tensor w = random.tensor(DType::bf16, channels), before = random.tensor(dtype(), shape);
    Tensor y(dtype(), shape), mean(DType::f32, rows), rstd(DType::f32, rows), rms(DType::f32, rows);
    reference::layer_norm(x, w, {}, y, mean, rstd, eps);
    reference::rms_norm(x, {w}, y, rms, eps);
    Tensor centred = before, dw_centred(DType::f32, channels), db_centred(DType::f32, channels);
    reference::layer_norm_backward(dy, x, w, mean, rstd, centred, true, dw_centred, db_centred);
    Tensor plain = before, dw_plain(DType::f32, channels);
    reference::rms_norm_backward(dy, x, {w}, rms, plain, true, dw_plain);
    const auto results = under_all_schedules([&] {
      const Operand d = bench().put(dy), in = bench().put(x), weight = bench().put(w), m = bench().put(mean);
      const Operand r = bench().put(rstd), q = bench().put(rms), a = bench().put(before), b = bench().put(before);
      const Operand dw = bench().put(Tensor(DType::f32, channels)), db = bench().put(Tensor(DType::f32, channels));
      const Operand dv = bench().put(Tensor(DType::f32, channels));
      ops().layer_norm_backward(d, in, weight, m, r, a, true, dw, db, stream());
      ops().rms_norm_backward(d, in, {weight}, q, b, true, dv, stream());
      return std::vector<Tensor>{bench().get(a), bench().get(dw), bench().get(db), bench().get(b), bench().get(dv)};
    });
    const Tensor* const expected[] = {&centred, &dw_centred, &db_centred, &plain, &dw_plain};
    for (std::size_t i = 0; i < results.size(); ++i) EXPECT_WITHIN(results[i], *expected[i], dtype(), false);
  }
}

INSTANTIATE_TEST_SUITE_P(Activations, NormOps, ::testing::Values(DType::f32, DType::bf16), dtype_name);

}  // namespace
}  // namespace tandem::testing
