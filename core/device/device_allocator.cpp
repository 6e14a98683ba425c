#include "core/device/device_allocator.hpp"

#include <fmt/format.h>

#include <cstdint>
#include <utility>

#include "core/base/error.hpp"
#include "core/memory/memory.hpp"

namespace tandem {

CallersMemory::CallersMemory(DeviceAllocator allocator) : allocator_(std::move(allocator)) {
  if (static_cast<bool>(allocator_.allocate) == static_cast<bool>(allocator_.free)) return;
  throw MisuseError("open_device with half an allocator", "one of its two functions is empty", "give both, or none");
}

void* CallersMemory::take(std::size_t bytes, std::string_view name, const std::string& held) const {
  void* const data = allocator_.allocate(bytes, arena_alignment);
  if (data == nullptr) {
    throw PlanError(fmt::format("the caller's allocator has no {} for '{}'", format_bytes(bytes), name),
                    fmt::format("held: {}", held), "give it more memory, or lower --device-memory", held);
  }
  if (reinterpret_cast<std::uintptr_t>(data) % arena_alignment == 0) return data;
  give_back(data, bytes);
  throw MisuseError(fmt::format("the caller's allocator gave '{}' memory at {}", name, data),
                    fmt::format("{} bytes of alignment were asked for", arena_alignment));
}

}  // namespace tandem
