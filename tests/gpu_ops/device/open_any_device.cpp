#include "tests/core/device/any_device.hpp"
#include "tests/gpu_ops/device/device_testing.hpp"

namespace tandem::testing {

std::unique_ptr<Device> open_any_device(std::size_t capacity) { return open_test_device(capacity); }

}  // namespace tandem::testing
