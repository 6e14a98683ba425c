#pragma once
// How the ranks of a test are connected: a program is linked with one of the files that say it.
#include <memory>
#include <span>
#include <vector>

#include "core/device/group.hpp"

namespace tandem::testing {

/// Members of a group of these devices, by rank.
std::vector<std::unique_ptr<Group>> connect(std::span<Device* const> devices, double watchdog_seconds);

}  // namespace tandem::testing
