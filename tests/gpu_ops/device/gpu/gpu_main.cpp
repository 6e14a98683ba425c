// Tests that need a GPU: without one all of them are skipped, which is said once.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>

#include "core/numerics/adam.hpp"
#include "tests/gpu_ops/device/device_testing.hpp"

namespace tandem {
namespace {

/// The driver loads a kernel when it is first launched, and the first use of much else takes its time too: more than
/// the watchdogs of some tests wait. So one device is used before all tests, as the engine uses it.
class FirstUse final : public ::testing::Environment {
 public:
  void SetUp() override {
    const std::unique_ptr<CudaDevice> device = testing::open_test_device();
    ASSERT_NE(device, nullptr);
    const MemoryBlock block = device->allocate(slots * slot, "first use");
    const MemoryBlock host = device->allocate_pinned(slot, "first use");
    Stream stream = device->make_stream("first use"), other = device->make_stream("other");
    Event event = device->make_event();
    auto* const first = static_cast<std::byte*>(block.data());
    device->fill_zero(first, block.bytes(), stream);
    launch_kernels(device->ops(), first, stream);
    device->copy(host.data(), first, slot, CopyKind::device_to_host, stream);
    device->record(event, stream);
    device->wait(other, event);
    device->copy(first, host.data(), slot, CopyKind::host_to_device, other);
    device->copy(first, first + slot, slot, CopyKind::device_to_device, other);
    device->synchronize(other);
  }

 private:
  static constexpr std::int64_t count = 4096;
  static constexpr std::size_t slots = 5, slot = count * sizeof(float);

  static void launch_kernels(Ops& ops, std::byte* at, StreamView stream) {
    auto* const sum = reinterpret_cast<float*>(at);
    auto* const gradient = reinterpret_cast<bf16*>(at + 3 * slot);
    auto* const weight = reinterpret_cast<bf16*>(at + 4 * slot);
    ops.round(sum, gradient, count, stream);
    ops.accumulate(sum, gradient, true, count, stream);
    ops.weights_of_master(sum, weight, count, stream);
    ops.norm_blocks(gradient, count, reinterpret_cast<double*>(at + 2 * slot), stream);
    for (const StateFormat format : state_formats) {
      const AdamPiece piece{{at, at + slot, at + 2 * slot}, gradient, weight, count, format, 0};
      ops.adamw(piece, numerics::adam_coefficients({}, 1, 1e-3, 1.0, true), stream);
    }
  }
};

}  // namespace
}  // namespace tandem

int main(int argc, char** argv) {
  ::testing::InitGoogleMock(&argc, argv);
  if (const tandem::CudaProbe probe = tandem::probe_cuda(); probe.first_usable < 0) {
    // The mark by which CTest tells skipped from passed.
    std::printf("[  SKIPPED ] %d tests: %s\n", ::testing::UnitTest::GetInstance()->total_test_count(),
                probe.why_none.c_str());
    return 0;
  }
  ::testing::AddGlobalTestEnvironment(new tandem::FirstUse);  // GoogleTest's from now on
  return RUN_ALL_TESTS();
}
