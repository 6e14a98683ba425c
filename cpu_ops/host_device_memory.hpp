#pragma once
// Memory of the host device: accounted to the byte, by name. Internal to cpu_ops.
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "core/memory.hpp"

namespace tandem {

/// Anonymous memory of the system: whole pages, huge ones where the system has them. Throws
/// std::bad_alloc. The system rounds up to pages; what is counted is what was asked for.
class MappedMemory {
 public:
  static void* map(std::size_t bytes);
  static void unmap(void* data, std::size_t bytes) noexcept;
};

/// Allocations below a hard ceiling. Thread-safe. Blocks may outlive it: they share it.
class HostDeviceMemory : public std::enable_shared_from_this<HostDeviceMemory> {
 public:
  HostDeviceMemory(std::size_t capacity, bool poison) : capacity_(capacity), poison_(poison) {}

  /// Zero bytes give an empty block. Throws PlanError, with what is held, over capacity, and
  /// DeviceError where the system has no more.
  MemoryBlock allocate(std::size_t bytes, std::string_view name);
  std::size_t allocated() const noexcept { return allocated_; }
  std::size_t peak() const noexcept { return peak_; }

  /// Throws MisuseError, naming the allocation concerned, unless all of [data, data + bytes) lies in
  /// one live allocation. `action` reads "copy to the device writes".
  void require_inside(const void* data, std::size_t bytes, std::string_view action) const;
  /// Throws MisuseError where [data, data + bytes) touches a live allocation.
  void require_outside(const void* data, std::size_t bytes, std::string_view action) const;

 private:
  struct Allocation {
    std::uintptr_t begin = 0;
    std::size_t bytes = 0;
    std::string name;
    bool holds(std::uintptr_t address) const noexcept { return address >= begin && address - begin < bytes; }
  };
  /// Freed allocations whose names are remembered, for messages.
  static constexpr std::size_t remembered = 64;

  void book(std::size_t bytes, std::string_view name);
  void enter(void* data, std::size_t bytes, std::string_view name);
  void free(void* data, std::size_t bytes) noexcept;
  std::string table() const;
  std::string describe(std::uintptr_t address) const;
  /// The live allocation that begins last at or before the address, or null.
  const Allocation* before(std::uintptr_t address) const;

  const std::size_t capacity_;
  const bool poison_;
  mutable std::mutex mutex_;
  std::map<std::uintptr_t, Allocation> live_;
  std::deque<Allocation> freed_;
  std::atomic<std::size_t> allocated_{0};
  std::atomic<std::size_t> peak_{0};
};

}  // namespace tandem
