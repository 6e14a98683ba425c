#pragma once
// Groups of ranks that are threads of one process, but know of each other by a rendezvous and Gloo alone.
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "core/device/group.hpp"
#include "tests/comm/processes/launch.hpp"

namespace tandem::testing {

/// Members of a group of these devices, by rank, with changed options of their rendezvous. `listening`: as `launch`.
std::vector<std::unique_ptr<Group>> connect_by_gloo(std::span<Device* const> devices, double watchdog_seconds,
                                                    const Change& change = {},
                                                    const std::function<void(int port)>& listening = {});

}  // namespace tandem::testing
