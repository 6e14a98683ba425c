// What of a model's arithmetic the performance model is told.
#include "train/performance.hpp"

#include <gtest/gtest.h>

#include <utility>

namespace tandem {
namespace {

// All of it but the last product, and the sum with the residual: backward does not need the block's output.
TEST(WorkOf, ABlockComputedAgainRunsItsForwardInBackwardToo) {
  for (const char* name : {"tiny-gpt2", "tiny-llama"}) {
    const ModelConfig model = builtin_model(name);
    RunShape shape{.batch = 2, .sequence = 17};
    const std::vector<LayerWork> kept = work_of(model, shape);
    const double outputs = 2.0 * 17.0 * static_cast<double>(model.width);
    const double product = 2.0 * outputs * static_cast<double>(model.ffn), sum = 3.0 * sizeof(float) * outputs;
    ASSERT_EQ(std::ssize(kept), model.layers + 2);
    for (shape.recomputed_blocks = 0; shape.recomputed_blocks <= model.layers; ++shape.recomputed_blocks) {
      const std::vector<LayerWork> work = work_of(model, shape);
      ASSERT_EQ(work.size(), kept.size());
      for (std::size_t i = 0; i < work.size(); ++i) {
        const bool again = i >= 1 && std::cmp_less_equal(i, shape.recomputed_blocks);
        const PassWork& forward = kept[i].forward;
        EXPECT_EQ(work[i].forward.matmul_flops, forward.matmul_flops);
        EXPECT_EQ(work[i].backward.matmul_flops,
                  kept[i].backward.matmul_flops + (again ? forward.matmul_flops - product : 0.0));
        EXPECT_EQ(work[i].backward.attention_flops,
                  kept[i].backward.attention_flops + (again ? forward.attention_flops : 0.0));
        EXPECT_EQ(work[i].backward.memory_bytes,
                  kept[i].backward.memory_bytes + (again ? forward.memory_bytes - sum : 0.0));
        EXPECT_EQ(work[i].backward.kernels, kept[i].backward.kernels + (again ? forward.kernels - 1.0 : 0.0));
      }
    }
  }
}

}  // namespace
}  // namespace tandem
