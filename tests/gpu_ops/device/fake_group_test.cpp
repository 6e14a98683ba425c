// A group of CUDA devices, any call of whose runtime may fail.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "tests/comm/group_testing.hpp"
#include "tests/gpu_ops/device/fake_device.hpp"

namespace tandem {
namespace {

using ::testing::AnyOf;
using ::testing::Each;
using testing::is_a;
using ::testing::IsEmpty;
using testing::value_of;
using testing::values_of;

constexpr std::size_t part = 700;

/// Each rank gathers twice, with a stream and memory of its own that last until all have come to their end. Returns
/// whether nobody was told of a failure, and whether all bytes are right.
struct Outcome {
  bool told = false;
  bool right = true;
};
Outcome gather(testing::Ranks& ranks) {
  const std::vector<ByteRange> parts = testing::parts_of({part, part});
  std::vector<MemoryBlock> blocks(2);
  std::vector<std::vector<std::byte>> seen(2, std::vector<std::byte>(2 * part));
  const auto errors = ranks.run([&](int rank) {
    const auto at = static_cast<std::size_t>(rank);
    try {
      blocks[at] = ranks.device(rank).allocate(2 * part, "block");
      ranks.write(rank, blocks[at].data(), values_of(rank, 0, 2 * part));
      for (int i = 0; i < 2; ++i) {
        ranks.group(rank).all_gather(static_cast<std::byte*>(blocks[at].data()), parts, ranks.stream(rank));
      }
      seen[at] = ranks.read(rank, blocks[at].data(), 2 * part);
    } catch (...) {
      ranks.group(rank).fail(std::current_exception());
      throw;
    }
  });
  // Queued work ends before its memory goes.
  for (int rank = 0; rank < 2; ++rank) ranks.end_stream(rank);
  EXPECT_THAT(errors, Each(AnyOf(nullptr, ::testing::ResultOf(is_a<DeviceError>, true))));
  Outcome outcome;
  for (const std::exception_ptr& error : errors) outcome.told |= error != nullptr;
  for (std::size_t i = 0; i < 2 * part; ++i) {
    const std::byte expected = value_of(i < part ? 0 : 1, 0, i);
    outcome.right &= seen[0][i] == expected && seen[1][i] == expected;
  }
  return outcome;
}

TEST(CudaGroup, AnyCallThatFailsOnceIsToldOrDoesNoHarm) {
  for (const cudaError_t code : {cudaErrorInvalidValue, cudaErrorECCUncorrectable}) {
    int told = 0;
    std::int64_t calls = 40;
    for (std::int64_t position = 0; position < calls; ++position) {
      {
        testing::Ranks ranks(2, 1, 20.0);
        fake_cuda::fail_call(position, code);
        const Outcome outcome = gather(ranks);
        EXPECT_TRUE(outcome.told || outcome.right) << "call " << position;
        told += outcome.told ? 1 : 0;
        if (!outcome.told) calls = std::max(calls, fake_cuda::calls());
      }
      EXPECT_EQ(fake_cuda::census(), fake_cuda::Census()) << "call " << position;
      EXPECT_THAT(fake_cuda::complaints(), IsEmpty()) << "call " << position;
    }
    EXPECT_GT(told, 30);
  }
}

}  // namespace
}  // namespace tandem
