#pragma once
// Memory of a device that context and libraries take. Internal to gpu_ops.
#include <cstddef>
#include <functional>
#include <string>

namespace tandem {

/// Bytes of a device's memory.
struct ContextMemory {
  std::size_t taken = 0;  ///< once the context is made and the libraries are loaded
  std::size_t later = 0;  ///< allowed for what the driver loads when it is first used
  std::size_t bytes() const noexcept { return taken + later; }
};

/// Calls `make`, which makes the context of device `ordinal` and loads the libraries, and returns what they take there:
/// by how much the memory in use grew meanwhile, of which others' is left out as far as NVML counts by process, where
/// NVML knows the device on `pci_bus`; and what is loaded later. Measured once in a process, since a context stays from
/// then on; or assumed once, no more than was in use then. `make` leaves the device current; a caller that made it so
/// before would have made the context. Throws what `make` throws. Thread-safe.
ContextMemory make_and_measure_context(int ordinal, const std::string& pci_bus, const std::function<void()>& make);

}  // namespace tandem
