// How kernels are started on a GPU: what the start itself returns is what counts, and nothing else is touched.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "gpu_ops/base/launch.hpp"

namespace {

cudaError_t pending = cudaSuccess;  ///< error that the runtime keeps for the thread
cudaError_t refusal = cudaSuccess;

int asked = 0;  ///< bytes of dynamic shared memory that were asked for

struct {
  const void* kernel = nullptr;
  unsigned grid = 0, block = 0;
  const float* data = nullptr;
  std::array<std::int64_t, 3> sizes{};
  std::size_t shared = 0;
  CUstream_st* stream = nullptr;
} started;

}  // namespace

cudaError_t cudaGetLastError() { return std::exchange(pending, cudaSuccess); }
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int bytes) {
  asked = bytes;
  return cudaSuccess;
}
cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** arguments, std::size_t shared,
                             CUstream_st* stream) {
  if (refusal != cudaSuccess) return pending = refusal;
  started = {.kernel = kernel, .grid = grid.x, .block = block.x, .shared = shared, .stream = stream};
  std::memcpy(&started.data, arguments[0], sizeof started.data);
  std::memcpy(&started.sizes, arguments[1], sizeof started.sizes);
  return cudaSuccess;
}

namespace tandem::gpu {

void runtime::require_launched(int result, std::string_view kernel) {
  if (result != cudaSuccess) throw std::runtime_error(std::string(kernel) + " " + std::to_string(result));
}

namespace {

void planted(const float*, std::array<std::int64_t, 3>) {}

const float data = 0;

void start() {
  launch("planted", planted, Geometry{.grid = 7, .block = 32, .shared_bytes = 48}, reinterpret_cast<CUstream_st*>(64),
         &data, std::array<std::int64_t, 3>{5, 6, 7});
}

TEST(Launch, HandsOnWhatItIsGiven) {
  start();
  EXPECT_EQ(started.kernel, reinterpret_cast<const void*>(planted));
  EXPECT_EQ(started.grid, 7U);
  EXPECT_EQ(started.block, 32U);
  EXPECT_EQ(started.shared, 48U);
  EXPECT_EQ(started.stream, reinterpret_cast<CUstream_st*>(64));
  EXPECT_EQ(started.data, &data);
  EXPECT_THAT(started.sizes, ::testing::ElementsAre(5, 6, 7));
}

// Static arrays count against what there is without asking.
TEST(Launch, AsksForSharedMemoryThatStaticArraysMayMakeTooMuch) {
  for (const std::size_t bytes : {std::size_t{47} << 10, std::size_t{48} << 10, std::size_t{98} << 10}) {
    asked = 0;
    launch("planted", planted, Geometry{.grid = 1, .block = 32, .shared_bytes = bytes}, nullptr, &data,
           std::array<std::int64_t, 3>{});
    EXPECT_EQ(asked, bytes > 47 << 10 ? static_cast<int>(bytes) : 0);
    EXPECT_EQ(started.shared, bytes);
  }
}

TEST(Launch, IsNotBlamedForAnOlderErrorOfTheProgram) {
  pending = cudaErrorMemoryAllocation;
  EXPECT_NO_THROW(start());
  EXPECT_EQ(std::exchange(pending, cudaSuccess), cudaErrorMemoryAllocation) << "nor does it take it away";
}

TEST(Launch, ThatIsRefusedSaysSo) {
  refusal = cudaErrorInvalidValue;
  EXPECT_THAT(start, ::testing::ThrowsMessage<std::runtime_error>("planted 1"));
  refusal = cudaSuccess;
}

}  // namespace
}  // namespace tandem::gpu
