#include "tests/comm/gloo/connect_by_gloo.hpp"

#include <utility>

#include "comm/gloo_transport.hpp"
#include "comm/process_group.hpp"
#include "tests/comm/connect.hpp"
#include "tests/comm/processes/launched_groups.hpp"

namespace tandem::testing {

std::vector<std::unique_ptr<Group>> connect_by_gloo(std::span<Device* const> devices, double watchdog_seconds,
                                                    const Change& change,
                                                    const std::function<void(int port)>& listening) {
  const auto make = [&](std::unique_ptr<Rendezvous> rendezvous, int rank) {
    Device& device = *devices[static_cast<std::size_t>(rank)];
    auto transport = make_gloo_transport(*rendezvous, device, watchdog_seconds);
    return make_process_group(std::move(rendezvous), std::move(transport), device);
  };
  return launch_groups(static_cast<int>(devices.size()), watchdog_seconds, make, change, listening);
}

std::vector<std::unique_ptr<Group>> connect(std::span<Device* const> devices, double watchdog_seconds) {
  return connect_by_gloo(devices, watchdog_seconds);
}

}  // namespace tandem::testing
