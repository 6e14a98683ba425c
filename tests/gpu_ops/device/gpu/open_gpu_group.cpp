// Ranks of a group on this machine's GPUs; several on one where there are too few.
#include <utility>

#include "tests/comm/group_testing.hpp"
#include "tests/gpu_ops/device/device_testing.hpp"

namespace tandem::testing {

std::vector<std::unique_ptr<Device>> open_group_devices(int ranks, std::uint64_t) {
  std::vector<std::unique_ptr<Device>> devices;
  for (auto& device : open_test_devices(ranks, std::size_t{8} << 20)) devices.push_back(std::move(device));
  return devices;
}

std::vector<std::string> complaints_of_devices() { return {}; }

}  // namespace tandem::testing
