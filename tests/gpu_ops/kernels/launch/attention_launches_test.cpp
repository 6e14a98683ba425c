// Into how many launches long attention is cut: counted, and none is run.
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>

#include "gpu_ops/base/attention.hpp"
#include "gpu_ops/device/runtime.hpp"
#include "gpu_ops/emulation/grid.hpp"
#include "tests/gpu_ops/kernels/launch/counted.hpp"

namespace tandem {

std::map<std::string, int>& testing::launches() {
  static std::map<std::string, int> counts;
  return counts;
}

void emulation::enqueue(const char* name, CUstream_st*, std::function<void()>) { ++testing::launches()[name]; }
void emulation::see_argument(const char*, const void*, std::size_t) {}
void gpu::runtime::require_alive(CUstream_st*, std::string_view) {}
int gpu::runtime::compute_capability() { return 90; }

namespace testing {
namespace {

std::map<std::string, int> launches_of(DType dtype, std::int64_t tokens) {
  const AttentionShape shape{1, tokens, 32, 8, 128, 0.1F};
  const HeadsView heads{nullptr, dtype, 32 * 128}, shared{nullptr, dtype, 8 * 128};
  const TensorView rows{nullptr, dtype, {tokens, 32 * 128}}, lse{nullptr, DType::f32, {1, 32, tokens}};
  launches().clear();
  gpu::plain_attention({heads, shared, shared, rows, lse, shape}, nullptr);
  gpu::plain_attention_backward({rows, heads, shared, shared, rows, lse, heads, shared, shared, shape}, nullptr,
                                nullptr);
  return launches();
}

TEST(AttentionLaunches, OnTensorCoresTakeMoreThanThoseOfFp32) {
  constexpr std::int64_t tokens = 16384;
  // 64 rows of 128 dimensions a tile, of which 32 heads have 8,192 and 8 have 2,048.
  auto of_tensors = launches_of(DType::bf16, tokens);
  EXPECT_EQ(of_tensors["attention"], 4) << "2^39 multiply-adds are 2,048 tiles";
  EXPECT_EQ(of_tensors["attention_dq"], 7) << "and 1,365 of three products";
  EXPECT_EQ(of_tensors["attention_dkv"], 2) << "no fewer than 1,024 tiles";
  // 32 rows a tile, twice as many. 2^36 multiply-adds are 512 of them, and 341 of three products.
  auto of_floats = launches_of(DType::f32, tokens);
  EXPECT_EQ(of_floats["attention"], 32);
  EXPECT_EQ(of_floats["attention_dq"], 49);
  EXPECT_EQ(of_floats["attention_dkv"], 16) << "no fewer than 256 tiles";
}

}  // namespace
}  // namespace testing
}  // namespace tandem
