#include "tests/core/device/any_device.hpp"
#include "tests/cpu_ops/host_device_testing.hpp"

namespace tandem::testing {

std::unique_ptr<Device> open_any_device(std::size_t capacity) { return std::make_unique<HostDevice>(small(capacity)); }

std::vector<std::unique_ptr<Device>> open_any_devices(int count, std::size_t capacity) {
  std::vector<std::unique_ptr<Device>> devices;
  for (int i = 0; i < count; ++i) devices.push_back(open_any_device(capacity));
  return devices;
}

}  // namespace tandem::testing
