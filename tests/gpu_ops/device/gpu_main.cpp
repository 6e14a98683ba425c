// Tests that need a GPU: without one all of them are skipped, which is said once.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>

#include "gpu_ops/cuda_device.hpp"

int main(int argc, char** argv) {
  ::testing::InitGoogleMock(&argc, argv);
  if (const tandem::CudaProbe probe = tandem::probe_cuda(); probe.first_usable < 0) {
    // The mark by which CTest tells skipped from passed.
    std::printf("[  SKIPPED ] %d tests: %s\n", ::testing::UnitTest::GetInstance()->total_test_count(),
                probe.why_none.c_str());
    return 0;
  }
  return RUN_ALL_TESTS();
}
