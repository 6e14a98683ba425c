#include "tests/core/device/any_device.hpp"
#include "tests/cpu_ops/host_device_testing.hpp"

namespace tandem::testing {

std::unique_ptr<Device> open_any_device(std::size_t capacity) { return std::make_unique<HostDevice>(small(capacity)); }

}  // namespace tandem::testing
