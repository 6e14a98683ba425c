#include "tests/core/device/any_device.hpp"
#include "tests/gpu_ops/device/device_testing.hpp"

namespace tandem::testing {

std::unique_ptr<Device> open_any_device(std::size_t capacity) { return open_test_device(capacity); }

std::vector<std::unique_ptr<Device>> open_any_devices(int count, std::size_t capacity) {
  std::vector<std::unique_ptr<Device>> devices;
  for (auto& device : open_test_devices(count, capacity)) devices.push_back(std::move(device));
  return devices;
}

}  // namespace tandem::testing
