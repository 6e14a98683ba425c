// Calls of the real cuDNN for cards that it is told of: each finds an engine, compiled for the card, within the
// workspace that is granted to it. Needs the library and no GPU.
#include <gmock/gmock.h>

#include <string>

#include "core/base/error.hpp"
#include "gpu_ops/base/attention.hpp"
#include "gpu_ops/ops/attention_cudnn.hpp"

namespace tandem::gpu {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

struct Card {
  int sm;
  std::string properties;
};

/// Cards as cuDNN describes them, from NVIDIA's published tables.
Card card(int sm, const char* name, int multiprocessors, int shared_per_block, std::int64_t l2, int threads = 2048,
          int blocks = 32) {
  return {sm, std::string(R"({"maxGridSize": [2147483647, 65535, 65535], "maxBlockSize": [1024, 1024, 64],
"regsPerBlock": 65536, "warpSize": 32, "maxSharedMemoryPerBlock": 49152, "reservedSharedMemoryPerBlock": 1024,
"maxRegistersPerSM": 65536, "maxThreadsPerBlock": 1024, "pciDeviceId": 0,
"isTccDriver": 0, "supportCoopLaunch": 1, "smClockRateKHz": 1410000, "memClockRateKHz": 1593000, "driverVer": 13000,
"cudaDeviceId": 0, "totalGlobalMem": 85000000000, "deviceVer": )") +
                  std::to_string(sm * 10) + R"(, "deviceName": ")" + name + R"(", "multiProcessorCount": )" +
                  std::to_string(multiprocessors) + R"(, "maxSharedMemoryPerBlockOptin": )" +
                  std::to_string(shared_per_block) + R"(, "maxThreadsPerSM": )" + std::to_string(threads) +
                  R"(, "maxCtasPerSM": )" + std::to_string(blocks) + R"(, "l2CacheSize": )" + std::to_string(l2) + "}"};
}
const Card a100 = card(80, "NVIDIA A100-SXM4-80GB", 108, 166912, 41943040);
const Card h100 = card(90, "NVIDIA H100 80GB HBM3", 132, 232448, 52428800);

const Card rtx3090 = card(86, "NVIDIA GeForce RTX 3090", 82, 101376, 6291456, 1536, 16);
const Card rtx4060 = card(89, "NVIDIA GeForce RTX 4060", 24, 101376, 25165824, 1536, 24);
const Card rtx5090 = card(120, "NVIDIA GeForce RTX 5090", 170, 101376, 100663296, 1536, 32);
const Card b200 = card(100, "NVIDIA B200", 148, 232448, 132644864);

/// q, k and v of one buffer, as GPT-2's are.
AttentionSlice slice_of(const AttentionShape& shape, bool backward) {
  const std::int64_t row = (shape.heads + 2 * shape.kv_heads) * shape.head_dim;
  return {.shape = shape,
          .slices = backward ? backward_slices(shape, row) : forward_slices(shape, row),
          .q_row = row,
          .k_row = row,
          .v_row = row,
          .dq_row = row,
          .dk_row = row,
          .dv_row = row,
          .backward = backward};
}

class CudnnPlans : public ::testing::Test {
 protected:
  void SetUp() override {
    if (attention_key() == "plain") GTEST_SKIP() << "cuDNN is not installed";
  }
};

// (B, T, heads, kv heads, head dim): gpt2-xl, a 7B and an 8B Llama, a 1B one at its longest, lengths that are no
// multiple of a tile, and the largest slices of many heads: gpt2-medium and the 1B Llama at half its length.
const AttentionShape shapes[] = {
    {8, 1024, 25, 25, 64, 0.125F}, {2, 4096, 32, 32, 128, 0.088F}, {1, 8192, 32, 8, 128, 0.088F},
    {1, 4096, 32, 8, 64, 0.125F},  {3, 37, 3, 1, 8, 0.4F},         {2, 131, 4, 2, 80, 0.11F},
    {2, 2, 1, 1, 16, 0.25F},       {8, 1024, 16, 16, 64, 0.125F},  {4, 2048, 32, 8, 64, 0.125F}};

/// Expects an engine within the workspace granted to it.
void expect_planned(const Card& at, const AttentionShape& shape) {
  for (const bool backward : {false, true}) {
    const AttentionSlice slice = slice_of(shape, backward);
    const AttentionPlan plan = plan_attention(slice, at.sm, at.properties);
    SCOPED_TRACE(std::to_string(at.sm) + (backward ? " backward of " : " forward of ") +
                 std::to_string(shape.sequence) + " tokens, slices of " + std::to_string(slice.slices.batch) + " x " +
                 std::to_string(slice.slices.kv_heads));
    EXPECT_NE(plan.engine, "") << plan.why_not;
    const std::size_t granted =
        backward ? backward_workspace(shape, slice.slices.batch, slice.slices.kv_heads) : forward_workspace;
    EXPECT_LE(plan.workspace, granted);
    EXPECT_LE(granted, most_workspace);
  }
}

TEST_F(CudnnPlans, EveryShapeHasAnEngineWithinTheWorkspaceGrantedToIt) {
  for (const Card& at : {a100, h100}) {
    for (const AttentionShape& shape : shapes) expect_planned(at, shape);
  }
}

TEST_F(CudnnPlans, SoHaveOlderAndNewerCards) {
  for (const Card& at : {rtx3090, rtx4060, rtx5090, b200}) {
    for (const std::size_t i : {0U, 2U, 5U}) expect_planned(at, shapes[i]);
  }
}

// Mistral 7B's, and one that is no multiple of a tile. The workspace stays that of all scores.
TEST_F(CudnnPlans, SoHaveWindows) {
  expect_planned(h100, {1, 8192, 32, 8, 128, 0.088F, 4096});
  for (const Card& at : {a100, rtx4060}) expect_planned(at, {2, 131, 4, 2, 80, 0.11F, 37});
}

TEST_F(CudnnPlans, BackwardKeepsTheGradientsOfScoresWhichIsWhatMakesItDeterministic) {
  // The engine that adds to dq from several blocks, in whatever order, needs an fp32 dq in its place.
  const AttentionShape shape{2, 1024, 8, 2, 128, 0.088F};
  const AttentionSlice slice = slice_of(shape, true);
  for (const Card& at : {a100, h100}) {
    const std::size_t scores = 2 * 8 * std::size_t{1024} * 1024 * 2;
    EXPECT_GE(plan_attention(slice, at.sm, at.properties).workspace, scores);
  }
}

TEST_F(CudnnPlans, WhatTheLibraryDoesNotTakeHasAReason) {
  // Compute capability 8.x and 12.0 have no backward of heads wider than 128; 9.0 has.
  const AttentionSlice wide = slice_of({1, 256, 2, 2, 256, 0.06F}, true);
  const AttentionPlan refused = plan_attention(wide, a100.sm, a100.properties);
  EXPECT_EQ(refused.engine, "");
  EXPECT_THAT(refused.why_not, HasSubstr("128"));
  EXPECT_EQ(refused.why_not.find('\n'), std::string::npos);
  EXPECT_EQ(plan_attention(wide, rtx5090.sm, rtx5090.properties).engine, "");
  EXPECT_NE(plan_attention(wide, h100.sm, h100.properties).engine, "");
}

TEST_F(CudnnPlans, ADescriptionThatIsNoneIsAnError) {
  EXPECT_THROW((void)plan_attention(slice_of(shapes[0], false), 90, "{}"), DeviceError);
}

/// Run by CTest where the library is hidden.
TEST(WithoutCudnn, DISABLED_ThePlainKernelsRunAndTheReasonIsTold) {
  std::string told;
  const auto attention = make_attention([&](const std::string& why) { told = why; });
  const AttentionForward nothing{};
  attention->forward(nothing, nullptr, nullptr);
  EXPECT_THAT(told, AllOf(HasSubstr("plain kernels"), HasSubstr("libcudnn.so.9"), HasSubstr("TANDEM_CUDA_LIBS")));
  EXPECT_EQ(attention_key(), "plain");
  EXPECT_THROW((void)plan_attention(slice_of(shapes[0], false), 90, h100.properties), DeviceError);
}

}  // namespace
}  // namespace tandem::gpu
