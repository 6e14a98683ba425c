// Arithmetic of a model that the performance model is told.
#include "train/setup/performance.hpp"

#include <gtest/gtest.h>

#include <tuple>
#include <utility>

#include "train/hf/lora_modules.hpp"
#include "train/hf/model_source.hpp"
#include "train/setup/reference_choice.hpp"

namespace tandem {
namespace {

// All of it but the last product, and the sum with the residual: backward does not need the block's output.
TEST(WorkOf, ABlockComputedAgainRunsItsForwardInBackwardToo) {
  for (const char* name : {"tiny-gpt2", "tiny-llama", "tiny-moe"}) {
    const ModelConfig model = builtin_model(name);
    RunShape shape{.batch = 2, .sequence = 17};
    const std::vector<LayerWork> kept = work_of(model, shape);
    const auto width = static_cast<double>(model.width);
    // With experts half of the last 16 rows of each are none, four rows make a token's output, and of 128 rows that
    // would hide the reading of a weight there are 4 * 34 / 16.
    const bool experts = model.experts > 0;
    const double rows = experts ? 4.0 * 34.0 + 16.0 * 8.0 : 34.0;
    const double product = 2.0 * rows * width * static_cast<double>(model.ffn);
    const double weights = 16.0 * width * static_cast<double>(model.ffn) * 2.0 * (1.0 - 8.5 / 128.0);
    const double sum = sizeof(float) * 34.0 * width * (3.0 + (experts ? 5.0 : 0.0)) + (experts ? weights : 0.0);
    ASSERT_EQ(std::ssize(kept), model.layers + 2);
    for (shape.recomputed_blocks = 0; shape.recomputed_blocks <= model.layers; ++shape.recomputed_blocks) {
      const std::vector<LayerWork> work = work_of(model, shape);
      ASSERT_EQ(work.size(), kept.size());
      for (std::size_t i = 0; i < work.size(); ++i) {
        const bool again = i >= 1 && std::cmp_less_equal(i, shape.recomputed_blocks);
        const PassWork& forward = kept[i].forward;
        EXPECT_EQ(work[i].forward.matmul_flops, forward.matmul_flops);
        EXPECT_DOUBLE_EQ(work[i].backward.matmul_flops,
                         kept[i].backward.matmul_flops + (again ? forward.matmul_flops - product : 0.0));
        EXPECT_EQ(work[i].backward.attention_flops,
                  kept[i].backward.attention_flops + (again ? forward.attention_flops : 0.0));
        EXPECT_DOUBLE_EQ(work[i].backward.memory_bytes,
                         kept[i].backward.memory_bytes + (again ? forward.memory_bytes - sum : 0.0));
        EXPECT_EQ(work[i].backward.kernels, kept[i].backward.kernels + (again ? forward.kernels - 1.0 : 0.0));
      }
    }
  }
}

// Two norms read and write the width, SwiGLU reads two and writes one of the MLP's width, GELU one and one; the norms
// of Qwen3's heads and their rotation read and write twice each.
TEST(WorkOf, WhatIsComputedAgainSelectivelyIsNoProduct) {
  for (const char* name : {"tiny-gpt2", "tiny-llama", "tiny-moe", "qwen3-0.6b", "olmo2-7b", "gemma3-1b"}) {
    const ModelConfig c = builtin_model(name);
    RunShape shape{.batch = 2, .sequence = 17, .recomputed_blocks = 1};
    const std::vector<LayerWork> kept = work_of(c, shape);
    shape.selective = true;
    const std::vector<LayerWork> work = work_of(c, shape);
    const auto ffn = static_cast<double>((c.family == Family::gpt2 ? 2 : 3) * c.ffn * c.mlp_rows());
    const auto heads = static_cast<double>(c.qk_norm != QkNorm::none ? 4 * c.head_dim * (c.heads + c.kv_heads) : 0);
    const double width = c.norm_before ? static_cast<double>(c.width) : 0.0;  // norms of OLMo 2 need not run again
    const double bytes = 34.0 * sizeof(float) * (4.0 * width + ffn + heads);
    for (std::size_t i = 0; i < work.size(); ++i) {
      const bool selected = i >= 2 && std::cmp_less_equal(i, c.layers);
      EXPECT_EQ(work[i].backward.memory_bytes, kept[i].backward.memory_bytes + (selected ? bytes : 0.0)) << name << i;
      EXPECT_EQ(work[i].backward.kernels > kept[i].backward.kernels, selected);
      EXPECT_EQ(work[i].backward.matmul_flops, kept[i].backward.matmul_flops);
      EXPECT_EQ(work[i].backward.attention_flops, kept[i].backward.attention_flops);
      EXPECT_EQ(work[i].forward.memory_bytes, kept[i].forward.memory_bytes);
    }
  }
}

TEST(WorkOf, TheLastProductOfABlockRunsAgainWhereANormIsOfIt) {
  for (const char* name : {"tiny-llama", "olmo2-7b"}) {
    const ModelConfig c = builtin_model(name);
    const LayerWork block = work_of(c, {.batch = 2, .sequence = 17, .recomputed_blocks = c.layers}).at(1);
    const double last = 2.0 * 34.0 * static_cast<double>(c.width * c.ffn);
    EXPECT_EQ(3.0 * block.forward.matmul_flops - block.backward.matmul_flops, c.norm_after ? 0.0 : last) << name;
  }
}

TEST(WorkOf, AWindowLeavesAttentionWhatATokenSees) {
  ModelConfig c = builtin_model("tiny-llama");
  const RunShape shape{.batch = 2, .sequence = 64};
  const std::vector<LayerWork> all = work_of(c, shape);
  c.window = 5;
  c.attention.assign(static_cast<std::size_t>(c.layers), {});
  c.attention[1].windowed = true;
  const std::vector<LayerWork> some = work_of(c, shape);
  const double share = positions_seen(64, 5) / 32.5;
  EXPECT_LT(share, 0.2);
  for (std::size_t i = 0; i < all.size(); ++i) {
    const double expected = i == 2 ? share : 1.0;
    EXPECT_DOUBLE_EQ(some[i].forward.attention_flops, expected * all[i].forward.attention_flops) << i;
    EXPECT_DOUBLE_EQ(some[i].backward.attention_flops, expected * all[i].backward.attention_flops) << i;
    EXPECT_EQ(some[i].forward.matmul_flops, all[i].forward.matmul_flops) << i;
  }
}

TEST(WorkOf, AHeadInSlicesTakesTheLogitsOnceMore) {
  const ModelConfig c = builtin_model("llama3.1-8b");
  const auto products = [&](std::int64_t sequence) {
    const LayerWork head = work_of(c, {.sequence = sequence, .compute = DType::bf16}).back();
    const double one = 2.0 * static_cast<double>(sequence * c.width) * static_cast<double>(c.vocabulary);
    return head.backward.matmul_flops / one;
  };
  EXPECT_EQ(products(4096), 3.0);
  EXPECT_EQ(products(4160), 4.0);
}

// One product more, that of the logits: the weight's moves from the head to the embedding.
TEST(WorkOf, ATablesGradientThatIsMadeLastTakesTheLogitsOnceMore) {
  for (const std::int64_t sequence : {17, 600}) {  // written whole, and added to
    const ModelConfig c = builtin_model("qwen3-0.6b");
    RunShape shape{.batch = 2, .sequence = sequence, .compute = DType::bf16};
    const std::vector<LayerWork> first = work_of(c, shape);
    shape.micro_batches = 2;
    ASSERT_TRUE(makes_table_last(c, shape));
    const std::vector<LayerWork> last = work_of(c, shape);
    const auto n = static_cast<double>(2 * sequence), width = static_cast<double>(c.width);
    const double product = 2.0 * n * width * static_cast<double>(c.vocabulary);
    const double of_rows = sequence == 17 ? 2.0 * n * n * width : 0.0;
    EXPECT_EQ(first.back().backward.matmul_flops, 3.0 * product + of_rows);
    EXPECT_EQ(last.back().backward.matmul_flops, 2.0 * product);
    EXPECT_EQ(last.front().backward.matmul_flops, 2.0 * product + of_rows);
    const double logits = 3.0 * n * sizeof(float) * static_cast<double>(c.vocabulary);
    EXPECT_DOUBLE_EQ(last.front().backward.memory_bytes + last.back().backward.memory_bytes,
                     first.front().backward.memory_bytes + first.back().backward.memory_bytes + logits);
    for (std::size_t i = 1; i + 1 < last.size(); ++i) {
      EXPECT_EQ(last[i].backward.matmul_flops, first[i].backward.matmul_flops);
    }
  }
}

/// A model with adapters of `q_proj`, and the layout that trains these alone.
std::pair<ModelConfig, ParameterLayout> with_adapters() {
  TrainConfig config;
  config.lora.rank = 4;
  config.lora.targets = "q_proj";
  ModelConfig model = builtin_model("tiny-llama");
  model.lora = lora_config(model, config.lora, "--lora-targets");
  ParameterLayout layout = trained_layout(config, model);
  return {std::move(model), std::move(layout)};
}

// Two products of the head are of gradients, the logits are made for these and before them for the losses of pairs; the
// reference takes them once more, and the forward of what is no adapter.
TEST(WorkOf, PreferencesTakeTheLogitsOnceMoreAndAReferenceInTheStepAForward) {
  const auto [model, layout] = with_adapters();
  RunShape shape{.batch = 2, .sequence = 17, .recomputed_blocks = 1};
  const double product = 2.0 * 34.0 * static_cast<double>(model.width * model.vocabulary);
  const auto work = [&] { return work_of(model, shape, {}, &layout); };
  EXPECT_EQ(work().back().backward.matmul_flops, 2.0 * product);
  shape.preference_beta = 0.1F;
  const std::vector<LayerWork> before = work();
  EXPECT_EQ(before.back().backward.matmul_flops, 3.0 * product);
  shape.reference_in_step = true;
  const std::vector<LayerWork> step = work();
  EXPECT_EQ(step.back().backward.matmul_flops, 4.0 * product);
  const PassWork base = work_of(model, shape)[1].forward;  // twice the forward, without adapters
  for (std::size_t i = 1; i + 1 < step.size(); ++i) {
    EXPECT_DOUBLE_EQ(step[i].forward.matmul_flops - before[i].forward.matmul_flops, base.matmul_flops / 2.0);
    EXPECT_DOUBLE_EQ(step[i].forward.attention_flops, 2.0 * before[i].forward.attention_flops);
    EXPECT_DOUBLE_EQ(step[i].forward.memory_bytes - before[i].forward.memory_bytes, base.memory_bytes / 2.0);
    EXPECT_EQ(step[i].backward.matmul_flops, before[i].backward.matmul_flops);
  }
}

// Records of --data are all computed beforehand, and those of the steps in the steps.
TEST(ReferenceWork, CountsPassesAndSteps) {
  TrainConfig config;
  config.micro_batch = 4, config.grad_accum = 3;
  const auto work = [&](std::int64_t scored, std::int64_t steps, double epochs, int ranks = 1) {
    config.sequences.scored = scored, config.steps = steps, config.epochs = epochs;
    const ReferenceWork made = reference_work(config, ranks);
    return std::tuple(made.passes, made.steps, made.repeats);
  };
  EXPECT_EQ(work(50, 3, 0.0), std::tuple(13, 3, false));
  EXPECT_EQ(work(50, 9, 0.0), std::tuple(13, 9, true));
  EXPECT_EQ(work(50, 9, 0.0, 2), std::tuple(7, 9, true));
  EXPECT_EQ(work(48, 0, 2.5), std::tuple(12, 10, true));
  EXPECT_EQ(work(0, 9, 0.0), std::tuple(27, 9, false)) << "without data each record is another";
  EXPECT_EQ(work(0, 0, 0.0), std::tuple(3, 1, false));
  EXPECT_EQ(work(0, 0, 3.0), std::tuple(3, 3, true));
}

}  // namespace
}  // namespace tandem
