#include "cpu_ops/host_device_memory.hpp"

#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>
#include <vector>

#include "core/error.hpp"

namespace tandem {
namespace {

using namespace literals;
constexpr std::size_t huge_page = 2_MiB;

std::size_t page() {
  static const std::size_t bytes = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

}  // namespace

void* MappedMemory::map(std::size_t bytes) {
  if (bytes > SIZE_MAX - 2 * huge_page) throw std::bad_alloc();
  const std::size_t size = align_up(bytes, page());
  // A huge page needs an aligned start: map more, give the ends back.
  const std::size_t spare = size >= huge_page ? huge_page : 0;
  void* mapped = ::mmap(nullptr, size + spare, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  if (spare == 0) return mapped;
  std::byte* begin = static_cast<std::byte*>(mapped);
  const std::uintptr_t address = reinterpret_cast<std::uintptr_t>(mapped);
  const std::size_t head = align_up(address, huge_page) - address;
  if (head > 0) ::munmap(begin, head);
  if (spare > head) ::munmap(begin + head + size, spare - head);
  ::madvise(begin + head, size, MADV_HUGEPAGE);  // advice: a system without huge pages works too
  return begin + head;
}

void MappedMemory::unmap(void* data, std::size_t bytes) noexcept { ::munmap(data, align_up(bytes, page())); }

MemoryBlock HostDeviceMemory::allocate(std::size_t bytes, std::string_view name) {
  if (bytes == 0) return {};
  book(bytes, name);
  void* data = nullptr;
  try {
    data = MappedMemory::map(bytes);
    enter(data, bytes, name);
  } catch (const std::bad_alloc&) {
    if (data != nullptr) MappedMemory::unmap(data, bytes);
    allocated_ -= bytes;
    throw DeviceError(fmt::format("the system refuses {} for '{}' on the host device", format_bytes(bytes), name),
                      "its memory is used up", "lower --device-memory");
  }
  // All ones are a NaN in f32 and bf16, so that whoever reads before writing shows it.
  if (poison_) std::memset(data, 0xFF, bytes);
  return {data, bytes, [self = shared_from_this()](void* p, std::size_t n) { self->free(p, n); }};
}

void HostDeviceMemory::book(std::size_t bytes, std::string_view name) {
  const std::lock_guard lock(mutex_);
  if (bytes > capacity_ - allocated_) {
    throw PlanError(fmt::format("device memory is full: '{}' needs {} ({} bytes)", name, format_bytes(bytes), bytes),
                    fmt::format("{} of {} bytes are free, held: {}", capacity_ - allocated_, capacity_,
                                live_.empty() ? std::string("nothing") : table()),
                    "raise --device-memory", table());
  }
  allocated_ += bytes;
  peak_ = std::max(peak_.load(), allocated_.load());
}

void HostDeviceMemory::enter(void* data, std::size_t bytes, std::string_view name) {
  const std::lock_guard lock(mutex_);
  const std::uintptr_t begin = reinterpret_cast<std::uintptr_t>(data);
  live_.emplace(begin, Allocation{begin, bytes, std::string(name)});
}

void HostDeviceMemory::free(void* data, std::size_t bytes) noexcept {
  {
    const std::lock_guard lock(mutex_);
    const auto found = live_.find(reinterpret_cast<std::uintptr_t>(data));
    try {
      if (freed_.size() == remembered) freed_.pop_front();
      freed_.push_back(std::move(found->second));
    } catch (...) {
      // The memory of names is a courtesy.
    }
    // Forgotten before it is unmapped: from then on the system may give the address to another thread.
    live_.erase(found);
  }
  MappedMemory::unmap(data, bytes);
  // Counted until it is really gone.
  allocated_ -= bytes;
}

std::string HostDeviceMemory::table() const {
  std::vector<const Allocation*> held;
  for (const auto& [begin, allocation] : live_) held.push_back(&allocation);
  std::stable_sort(held.begin(), held.end(), [](auto* a, auto* b) { return a->bytes > b->bytes; });
  std::string text;
  for (const Allocation* a : held) {
    text += fmt::format("{}'{}' {}", text.empty() ? "" : ", ", a->name, format_bytes(a->bytes));
  }
  return text;
}

const HostDeviceMemory::Allocation* HostDeviceMemory::before(std::uintptr_t address) const {
  const auto next = live_.upper_bound(address);
  return next == live_.begin() ? nullptr : &std::prev(next)->second;
}

std::string HostDeviceMemory::describe(std::uintptr_t address) const {
  for (auto a = freed_.rbegin(); a != freed_.rend(); ++a) {
    if (a->holds(address)) return fmt::format("the freed buffer '{}'", a->name);
  }
  return "no allocation of the device";
}

void HostDeviceMemory::require_inside(const void* data, std::size_t bytes, std::string_view action) const {
  const std::uintptr_t address = reinterpret_cast<std::uintptr_t>(data);
  const std::lock_guard lock(mutex_);
  const Allocation* a = before(address);
  if (a == nullptr || !a->holds(address)) {
    throw MisuseError(fmt::format("{} {}", action, describe(address)), fmt::format("{} bytes at {}", bytes, data));
  }
  const std::size_t offset = address - a->begin;
  if (bytes > a->bytes - offset) {
    throw MisuseError(fmt::format("{} beyond the end of '{}'", action, a->name),
                      fmt::format("{} bytes at offset {} of {}", bytes, offset, a->bytes));
  }
}

void HostDeviceMemory::require_outside(const void* data, std::size_t bytes, std::string_view action) const {
  const std::uintptr_t address = reinterpret_cast<std::uintptr_t>(data);
  const std::lock_guard lock(mutex_);
  const Allocation* a = before(address + bytes - 1);
  if (a != nullptr && a->begin + a->bytes > address) {
    throw MisuseError(fmt::format("{} the device buffer '{}' as if it were host memory", action, a->name));
  }
}

}  // namespace tandem
