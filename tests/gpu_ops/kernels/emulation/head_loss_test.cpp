// The output layer in chunks of rows, of all sizes that its shapes alone would only have for large vocabularies.
#include "gpu_ops/head_loss.hpp"

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
  Tensor losses(DType::f32, {rows}), dx(dtype(), {rows, channels}), dw = dw_before;
  reference::head_loss({x, w, targets, losses, 0.125F, dx, dw});
  const auto matmul = gpu::make_matmul(90);
  Tensor whole(DType::f32, {rows});
  for (const gpu::HeadRows at_once : {gpu::HeadRows{37, 37}, {1, 1}, {4, 4}, {4, 9}, {3, 37}, {36, 37}}) {
    if (!apart && at_once.logits != at_once.gradients) continue;
    SCOPED_TRACE(at_once.logits);
    const auto bytes = static_cast<std::int64_t>(gpu::head_loss_scratch(at_once, vocabulary, dtype(), true));
    const Operand scratch = bench().put(random.tensor(DType::f32, {bytes / 4}));
    const Operand in = bench().put(x), weight = bench().put(w), t = bench().put(targets);
    const Operand l = bench().put(Tensor(DType::f32, {rows})), d = bench().put(Tensor(dtype(), {rows, channels}));
    const Operand dweight = bench().put(dw_before);
    gpu::head_loss({in, weight, t, l, 0.125F, d, dweight}, at_once, *matmul, nullptr, scratch.view().data, nullptr);
    EXPECT_WITHIN(bench().get(l), losses, dtype(), false);
    EXPECT_WITHIN(bench().get(d), dx, dtype(), true);
    EXPECT_WITHIN(bench().get(dweight), dw, dtype(), true);
    EXPECT_TRUE(bench().get(scratch).intact());
    if (at_once.logits == rows) whole = bench().get(l);
    EXPECT_SAME_BITS(bench().get(l), whole);
  }
}

INSTANTIATE_TEST_SUITE_P(Activations, HeadLossInChunks, ::testing::Values(DType::f32, DType::bf16));

}  // namespace
}  // namespace tandem::testing
