#pragma once
// A caller's own source of a device's memory, a pool say, in place of the device's.
#include <cstddef>
#include <functional>
#include <string>
#include <string_view>

namespace tandem {

/// Functions of a caller's that give a device its memory, so that both share one pool. A device counts what it takes
/// under its own ceiling all the same. Both are given, or none; any thread calls them, on a GPU with the device
/// current.
struct DeviceAllocator {
  /// Returns memory of the device, uninitialised, aligned to `alignment` bytes (a power of two), that no queued work
  /// uses any more; null where there is none. May throw: whoever asked the device for memory gets that exception.
  std::function<void*(std::size_t bytes, std::size_t alignment)> allocate{};
  /// Takes such memory back, once for each. Must not throw. Is called when the block goes, which may be after the
  /// device.
  std::function<void(void* data, std::size_t bytes)> free{};
};

/// Calls to an allocator, checked. False where none is given: the device has memory of its own.
class CallersMemory {
 public:
  /// Throws MisuseError where one of the two functions is missing.
  explicit CallersMemory(DeviceAllocator allocator);
  explicit operator bool() const noexcept { return static_cast<bool>(allocator_.allocate); }

  /// Takes `bytes` bytes, aligned to `arena_alignment`. Throws PlanError, with `held` by the device, where there are
  /// none; MisuseError where they are not aligned; what the allocator throws.
  void* take(std::size_t bytes, std::string_view name, const std::string& held) const;
  void give_back(void* data, std::size_t bytes) const noexcept { allocator_.free(data, bytes); }

 private:
  DeviceAllocator allocator_;
};

}  // namespace tandem
