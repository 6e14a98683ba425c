#pragma once
// A group of devices in one process.
#include <memory>
#include <span>
#include <vector>

#include "core/device/group.hpp"

namespace tandem {

/// Members of a group, one for each device, rank by rank, each to be driven by a thread of its own. The devices are of
/// one kind, copy straight from each other's memory, and must outlive all members; one device may be there several
/// times. Throws MisuseError where there is no device, one is null, or kinds differ.
/// A call that throws does so once no other rank reads the memory that it has shown, where their streams get there
/// within the watchdog's time. A rank whose stream has failed later, which others are not told, may still be read: it
/// leaves before its memory goes. `leave` blocks until the others' streams have copied from this rank; to them the rank
/// "has left". `watchdog_seconds`: how long a call waits without anybody coming to it. Calls that do not agree, in kind
/// or in parts, sizes or roots, throw MisuseError on every rank; so does each call from then on, as after any failure.
std::vector<std::unique_ptr<Group>> make_local_group(std::span<Device* const> devices, double watchdog_seconds = 300.0);

}  // namespace tandem
