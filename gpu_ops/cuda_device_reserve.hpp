#pragma once
// What context and libraries take of a device's memory. Internal to gpu_ops.
#include <cstddef>
#include <functional>
#include <string>

namespace tandem {

/// Calls `make`, which makes the context of device `ordinal` and loads the libraries, and returns the bytes that they
/// take there: by how much the memory in use grew meanwhile, where NVML knows the device on `pci_bus`, and what is
/// loaded later. Measured once in a process, since a context stays from then on. `make` leaves the device current; a
/// caller that made it so before would have made the context. Throws what `make` throws. Thread-safe.
std::size_t make_and_measure_context(int ordinal, const std::string& pci_bus, const std::function<void()>& make);

}  // namespace tandem
