// The engine's tests on the host device.
#include "tests/offload/toy/device.hpp"

namespace tandem::testing {

std::unique_ptr<ToyDevice> make_toy_device(const HostDeviceOptions& options) { return make_toy_host_device(options); }
std::vector<std::unique_ptr<ToyDevice>> make_toy_devices(std::span<const HostDeviceOptions> options) {
  std::vector<std::unique_ptr<ToyDevice>> devices;
  for (const HostDeviceOptions& of_device : options) devices.push_back(make_toy_device(of_device));
  return devices;
}
std::string_view injected_failure() { return "injected failure"; }
bool takes_faults() { return true; }
bool has_faults_of_its_own() { return true; }
bool emulates_link() { return true; }

}  // namespace tandem::testing
