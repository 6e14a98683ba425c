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
    data = take(bytes, name);
    ledger_.enter(data, bytes, name);
  } catch (...) {
    if (data != nullptr) give_back(data, bytes);
    ledger_.unbook(bytes);
    throw;
  }
  // All ones are a NaN in f32 and bf16, so that whoever reads before writing shows it.
  if (poison_) std::memset(data, 0xFF, bytes);
  return {data, bytes, [self = shared_from_this()](void* p, std::size_t n) { self->free(p, n); }};
}

void* HostDeviceMemory::take(std::size_t bytes, std::string_view name) const {
  if (source_) return source_.take(bytes, name, ledger_.table());
  try {
    return MappedMemory::map(bytes);
  } catch (const std::bad_alloc&) {
    throw DeviceError(fmt::format("the system refuses {} for '{}' on the host device", format_bytes(bytes), name),
                      "its memory is used up", "lower --device-memory");
  }
}

void HostDeviceMemory::give_back(void* data, std::size_t bytes) const noexcept {
  if (source_) return source_.give_back(data, bytes);
  MappedMemory::unmap(data, bytes);
}

void HostDeviceMemory::free(void* data, std::size_t bytes) noexcept {
  // Forgotten before it is unmapped: from then on the system may give the address to another thread.
  ledger_.leave(data);
  give_back(data, bytes);
  // Counted until it is really gone.
  ledger_.unbook(bytes);
}

}  // namespace tandem
