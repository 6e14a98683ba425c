// The output layer in chunks of rows, of all sizes that its shapes alone would only have for large vocabularies.
#include "gpu_ops/ops/head_loss.hpp"

#include <vector>

#include "cpu_ops/reference/reference.hpp"
#include "tests/gpu_ops/kernels/bench.hpp"

namespace tandem::testing {
namespace {

class HeadLossInChunks : public OpsTest {};

TEST_P(HeadLossInChunks, IsTheReferenceWithinItsScratch) {
  const std::int64_t rows = 37, channels = 24, vocabulary = 101;
  const bool apart = dtype() == DType::bf16;
  Random random(8);
  const Tensor x = random.tensor(dtype(), {rows, channels}), w = random.tensor(DType::bf16, {vocabulary, channels});
  Tensor targets = random.tokens({rows}, static_cast<std::int32_t>(vocabulary));
  targets.view().as<std::int32_t>()[3] = -1;
  const Tensor dw_before = random.tensor(DType::f32, {vocabulary, channels}, 0.01F);
  const Tensor factors = random.tensor(DType::f32, {rows});  // sequences of a token each
  Tensor losses(DType::f32, {rows}), dx(dtype(), {rows, channels}), dw = dw_before;
  reference::head_loss({x, w, targets, losses, 0.125F, dx, dw, factors});
  const auto matmul = gpu::make_matmul(90);
  Tensor whole(DType::f32, {rows});
  for (const gpu::HeadRows at_once : {gpu::HeadRows{37, 37}, {1, 1}, {4, 4}, {4, 9}, {3, 37}, {36, 37}}) {
    if (!apart && at_once.logits != at_once.gradients) continue;
    SCOPED_TRACE(at_once.logits);
    const auto bytes = static_cast<std::int64_t>(gpu::head_loss_scratch(at_once, {rows, vocabulary, dtype()}));
    const Operand scratch = bench().put(random.tensor(DType::f32, {bytes / 4}));
    const Operand in = bench().put(x), weight = bench().put(w), t = bench().put(targets);
    const Operand l = bench().put(Tensor(DType::f32, {rows})), d = bench().put(Tensor(dtype(), {rows, channels}));
    const Operand dweight = bench().put(dw_before), f = bench().put(factors);
    gpu::head_loss({in, weight, t, l, 0.125F, d, dweight, f}, at_once, *matmul, nullptr, scratch.view().data, nullptr);
    EXPECT_WITHIN(bench().get(l), losses, dtype(), false);
    EXPECT_WITHIN(bench().get(d), dx, dtype(), true);
    EXPECT_WITHIN(bench().get(dweight), dw, dtype(), true);
    EXPECT_TRUE(bench().get(scratch).intact());
    if (at_once.logits == rows) whole = bench().get(l);
    EXPECT_SAME_BITS(bench().get(l), whole);
  }
}

/// The output layer in chunks, with the weight's gradient in slices.
TEST_P(HeadLossInChunks, WritesTheWeightInSlicesOfTheSameBitsWithinItsScratch) {
  const std::int64_t rows = 37, channels = 24, vocabulary = 101;
  Random random(8);
  const Tensor x = random.tensor(dtype(), {rows, channels}), w = random.tensor(DType::bf16, {vocabulary, channels});
  Tensor targets = random.tokens({rows}, static_cast<std::int32_t>(vocabulary));
  targets.view().as<std::int32_t>()[3] = -1;
  const Tensor factors = random.tensor(DType::f32, {rows});
  const auto matmul = gpu::make_matmul(90);
  const auto run = [&](std::int64_t written, std::int64_t logits, std::int64_t rows_at_once) {
    const gpu::HeadShape shape{.tokens = rows, .vocabulary = vocabulary, .activations = dtype(), .written = written};
    gpu::HeadRows at_once = gpu::head_loss_rows(shape);
    if (dtype() == DType::bf16) at_once.slice_logits = logits;
    at_once.logits = at_once.gradients = rows_at_once;
    const auto bytes = static_cast<std::int64_t>(gpu::head_loss_scratch(at_once, shape));
    const Operand scratch = bench().put(random.tensor(DType::f32, {bytes / 4}));
    const Operand in = bench().put(x), weight = bench().put(w), t = bench().put(targets);
    const Operand l = bench().put(Tensor(DType::f32, {rows})), d = bench().put(Tensor(dtype(), {rows, channels}));
    const Operand dweight = bench().put(random.tensor(DType::bf16, {vocabulary, channels}));
    const Operand f = bench().put(factors);
    HeadLoss head{in, weight, t, l, 0.125F, d, dweight, f};
    head.rows_at_once = written;
    gpu::head_loss(head, at_once, *matmul, nullptr, scratch.view().data, nullptr);
    EXPECT_TRUE(bench().get(scratch).intact());
    return std::vector<Tensor>{bench().get(l), bench().get(d), bench().get(dweight)};
  };
  const std::vector<Tensor> whole = run(vocabulary, 1, rows);
  for (const std::int64_t written : {1, 8, 50, 100}) {
    for (const std::int64_t logits : {1, 9, 37}) {
      SCOPED_TRACE(written);
      const std::vector<Tensor> slices = run(written, logits, logits);
      for (std::size_t i = 0; i < whole.size(); ++i) EXPECT_SAME_BITS(slices[i], whole[i]);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Activations, HeadLossInChunks, ::testing::Values(DType::f32, DType::bf16));

}  // namespace
}  // namespace tandem::testing
