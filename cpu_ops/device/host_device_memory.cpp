#include "cpu_ops/device/host_device_memory.hpp"

#include <fmt/format.h>

#include <cstring>
#include <new>

#include "core/base/error.hpp"
#include "core/host/mapped_memory.hpp"

namespace tandem {
MemoryBlock HostDeviceMemory::allocate(std::size_t bytes, std::string_view name) {
  if (bytes == 0) return {};
  ledger_.book(bytes, name);
  void* data = nullptr;
  try {
    data = MappedMemory::map(bytes);
    ledger_.enter(data, bytes, name);
  } catch (const std::bad_alloc&) {
    if (data != nullptr) MappedMemory::unmap(data, bytes);
    ledger_.unbook(bytes);
    throw DeviceError(fmt::format("the system refuses {} for '{}' on the host device", format_bytes(bytes), name),
                      "its memory is used up", "lower --device-memory");
  }
  // All ones are a NaN in f32 and bf16, so that whoever reads before writing shows it.
  if (poison_) std::memset(data, 0xFF, bytes);
  return {data, bytes, [self = shared_from_this()](void* p, std::size_t n) { self->free(p, n); }};
}

void HostDeviceMemory::free(void* data, std::size_t bytes) noexcept {
  // Forgotten before it is unmapped: from then on the system may give the address to another thread.
  ledger_.leave(data);
  MappedMemory::unmap(data, bytes);
  // Counted until it is really gone.
  ledger_.unbook(bytes);
}

}  // namespace tandem
