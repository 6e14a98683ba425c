// Ranges through NVIDIA's own headers to a profiler loaded by them. Once in a process they look for one: each case is
// run by itself, with and without.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <utility>

#include "gpu_ops/device/cuda_device_ranges.hpp"
#include "tests/gpu_ops/device/nvtx/profiler.hpp"

namespace tandem {
namespace {

using profiler::SeenRange;
using ::testing::ElementsAre;

TEST(Nvtx, RangesReachTheProfiler) {
  const auto ranges = NvtxRanges::open();
  ASSERT_NE(ranges, nullptr);
  NamedRange copy(*ranges, "host to device", "fetch_weights h.0", 4096);
  NamedRange update(*ranges, "cpu", "update_cpu h.3");
  const NamedRange open(*ranges, "host to device", "fetch_weights h.1", 1);
  copy = NamedRange(*ranges, "cpu", "accumulate_gradient h.2");
  update.end();
  EXPECT_THAT(profiler::seen(), ElementsAre(SeenRange{"tandem", "host to device", "fetch_weights h.0", 4096, true},
                                            SeenRange{"tandem", "cpu", "update_cpu h.3", 0, true},
                                            SeenRange{"tandem", "host to device", "fetch_weights h.1", 1, false},
                                            SeenRange{"tandem", "cpu", "accumulate_gradient h.2", 0, false}));
}

TEST(Nvtx, ThereAreNoneWithoutAProfiler) { EXPECT_EQ(NvtxRanges::open(), nullptr); }

}  // namespace
}  // namespace tandem
