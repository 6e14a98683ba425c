#pragma once
// Memory of the host device: accounted to the byte, by name. Internal to cpu_ops.
#include <cstddef>
#include <memory>
#include <string_view>
#include <utility>

#include "core/device/device_allocator.hpp"
#include "core/device/memory_ledger.hpp"
#include "core/memory/memory.hpp"

namespace tandem {

/// Allocations below a hard ceiling. Thread-safe. Blocks may outlive it: they share it.
class HostDeviceMemory : public std::enable_shared_from_this<HostDeviceMemory> {
 public:
  HostDeviceMemory(std::size_t capacity, bool poison, DeviceAllocator allocator)
      : ledger_(capacity), poison_(poison), source_(std::move(allocator)) {}

  /// Zero bytes give an empty block. Throws PlanError, with what is held, over capacity, DeviceError where the system
  /// has no more, and as CallersMemory.
  MemoryBlock allocate(std::size_t bytes, std::string_view name);
  const MemoryLedger& ledger() const noexcept { return ledger_; }

 private:
  void* take(std::size_t bytes, std::string_view name) const;
  void give_back(void* data, std::size_t bytes) const noexcept;
  void free(void* data, std::size_t bytes) noexcept;

  MemoryLedger ledger_;
  const bool poison_;
  const CallersMemory source_;
};

}  // namespace tandem
