#pragma once
// Book-keeping of a device's memory: what is held, under which name, below a hard ceiling. It owns no
// memory; a device asks it before it allocates and tells it what became of it.
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <string_view>

namespace tandem {

enum class CopyKind : std::uint8_t;

/// Thread-safe. Counts to the byte.
class MemoryLedger {
 public:
  explicit MemoryLedger(std::size_t capacity) : capacity_(capacity) {}

  /// Takes `bytes` from the capacity. Throws PlanError, with what is held, where they would pass it.
  void book(std::size_t bytes, std::string_view name);
  /// Gives booked bytes back: once the memory is really gone, or could not be had.
  void unbook(std::size_t bytes) noexcept { allocated_ -= bytes; }
  /// Booked bytes now lie at `data`. Throws std::bad_alloc.
  void enter(const void* data, std::size_t bytes, std::string_view name);
  /// Takes bytes out of the ledger: to be called before the memory is freed, as its address may come back at once.
  void leave(const void* data) noexcept;

  std::size_t capacity() const noexcept { return capacity_; }
  std::size_t allocated() const noexcept { return allocated_; }
  std::size_t peak() const noexcept { return peak_; }
  /// "'weights' 512.0 KiB, 'gradients' 256.0 KiB", the largest first; "nothing".
  std::string table() const;

  /// Throws MisuseError, naming the allocation concerned, unless all of [data, data + bytes) lies in
  /// one live allocation. `action` reads "copy to the device writes".
  void require_inside(const void* data, std::size_t bytes, std::string_view action) const;
  /// Throws MisuseError where [data, data + bytes) touches a live allocation.
  void require_outside(const void* data, std::size_t bytes, std::string_view action) const;
  /// Throws MisuseError where the device's side of a copy does not lie in one live allocation, the host's
  /// side does, or both sides overlap.
  void require_copyable(const void* to, const void* from, std::size_t bytes, CopyKind kind) const;

 private:
  struct Allocation {
    std::uintptr_t begin = 0;
    std::size_t bytes = 0;
    std::string name;
    bool holds(std::uintptr_t address) const noexcept { return address >= begin && address - begin < bytes; }
  };
  /// Freed allocations whose names are remembered, for messages.
  static constexpr std::size_t remembered = 64;

  std::string held() const;
  std::string describe(std::uintptr_t address) const;
  /// The live allocation that begins last at or before the address, or null.
  const Allocation* before(std::uintptr_t address) const;

  const std::size_t capacity_;
  mutable std::mutex mutex_;
  std::map<std::uintptr_t, Allocation> live_;
  std::deque<Allocation> freed_;
  std::atomic<std::size_t> allocated_{0};
  std::atomic<std::size_t> peak_{0};
};

}  // namespace tandem
