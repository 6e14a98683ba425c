// The engine's tests on the host device.
#include "tests/offload/toy_device.hpp"

namespace tandem::testing {

std::unique_ptr<ToyDevice> make_toy_device(const HostDeviceOptions& options) { return make_toy_host_device(options); }
std::string_view injected_failure() { return "injected failure"; }
bool takes_faults() { return true; }
bool emulates_link() { return true; }

}  // namespace tandem::testing
