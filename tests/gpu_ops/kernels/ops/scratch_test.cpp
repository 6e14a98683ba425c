// Scratch that the ops of a device ask for, beside the rules by which runs on a GPU are planned elsewhere.
#include "gpu_ops/base/scratch.hpp"

#include "cpu_ops/device/host_ops.hpp"
#include "tests/gpu_ops/kernels/bench.hpp"

namespace tandem::testing {
namespace {

WorkspaceNeeds llama_1b(std::int64_t batch, bool gradients) {
  return {.tokens = batch * 1024,
          .sequence = 1024,
          .vocabulary = 128256,
          .channels = 8192,
          .heads = 32,
          .kv_heads = 8,
          .head_dim = 64,
          .activations = DType::bf16,
          .gradients = gradients};
}

// 261 rows of fp32 logits and the gradients of 1,024 in bf16.
TEST(Scratch, OfATypicalGpuIsThatOfProductsAndOfTheLargestCall) {
  const std::size_t head = std::size_t{261} * 128256 * 4 + std::size_t{1024} * 128256 * 2;
  EXPECT_EQ(gpu::TypicalRules().workspace_bytes(llama_1b(4, true)), align_up(head) + (std::size_t{32} << 20));
  // Without a head, the gradients of the scores of 128 heads: beyond what is preferred for them.
  WorkspaceNeeds block = llama_1b(4, true);
  block.vocabulary = 1;
  EXPECT_EQ(gpu::TypicalRules().workspace_bytes(block), (std::size_t{288} + 32) << 20);
  block.heads = 0;
  EXPECT_EQ(gpu::TypicalRules().workspace_bytes(block), gpu::norm_backward_scratch(8192) + (std::size_t{32} << 20));
}

TEST(Scratch, HasTheGradientsOfAllLogitsWhereThatOfTheHeadIsWrittenWhole) {
  WorkspaceNeeds needs = llama_1b(2, true);
  const std::size_t logits = std::size_t{261} * 128256 * 4, of_row = std::size_t{128256} * 2;
  EXPECT_EQ(gpu::ops_scratch(needs, 0, 0), align_up(logits) + 1024 * of_row);
  needs.head_rows = 128256;
  EXPECT_EQ(gpu::ops_scratch(needs, 0, 0), align_up(logits) + 2048 * of_row);
  EXPECT_GE(HostRules(2).workspace_bytes(needs), 2048 * 2 * of_row);
  const std::size_t on_host = HostRules(2).workspace_bytes(needs);
  needs.token_rows = true;
  EXPECT_EQ(gpu::ops_scratch(needs, 0, 0), align_up(logits) + 2048 * of_row + std::size_t{2048} * 2048 * 2);
  EXPECT_EQ(HostRules(2).workspace_bytes(needs), on_host + std::size_t{2048} * 2048 * 4);
  needs.gradients = false;
  EXPECT_EQ(gpu::ops_scratch(needs, 0, 0), align_up(logits));
}

// Two floats of each token, and either what is needed without, or the gradients of some columns of all rows and logits.
TEST(Scratch, HasTheGradientsOfASliceWhereThatOfTheHeadIsWrittenInSlices) {
  WorkspaceNeeds needs = llama_1b(16, true);
  const std::size_t before = gpu::ops_scratch(needs, 0, 0), scales = std::size_t{16384} * 8;
  needs.head_rows = 1024;
  EXPECT_EQ(gpu::ops_scratch(needs, 0, 0), before + scales);
  needs.head_rows = 16384;
  const std::size_t gradients = std::size_t{16384} * 16384 * 2, logits = std::size_t{128} << 20;
  EXPECT_EQ(gpu::ops_scratch(needs, 0, 0), scales + gradients + logits);
  EXPECT_GE(HostRules(2).workspace_bytes(needs), scales + 2 * gradients);
  needs.gradients = false;
  EXPECT_EQ(gpu::ops_scratch(needs, 0, 0), align_up(std::size_t{261} * 128256 * 4));
}

TEST(Scratch, IsNoMoreThanPlansMadeElsewhereCount) {
  if (const std::string why = bench().why_not(); !why.empty()) GTEST_SKIP() << why;
  for (const std::int64_t batch : {1, 3, 8}) {
    for (const bool gradients : {false, true}) {
      const WorkspaceNeeds needs = llama_1b(batch, gradients);
      const std::size_t asked = bench().ops().workspace_bytes(needs);
      EXPECT_LE(asked, gpu::TypicalRules().workspace_bytes(needs)) << batch;
      EXPECT_GE(asked, gpu::ops_scratch(needs, 0, 0)) << batch;
    }
  }
}

}  // namespace
}  // namespace tandem::testing
