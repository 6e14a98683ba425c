#pragma once
// Memory of the CUDA device, and host memory that its copies reach. Internal to gpu_ops.
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/device/device.hpp"
#include "core/device/device_allocator.hpp"
#include "core/device/memory_ledger.hpp"
#include "core/memory/memory.hpp"

namespace tandem {

class NumaNode;
class Parallel;

/// Allocations on one device below a hard ceiling. Thread-safe. Blocks may outlive it: they share it.
class CudaDeviceMemory : public std::enable_shared_from_this<CudaDeviceMemory> {
 public:
  /// `holders` tells who else holds memory there, for messages; it may be empty and may say nothing.
  CudaDeviceMemory(int ordinal, std::size_t capacity, DeviceAllocator allocator, std::function<std::string()> holders)
      : ordinal_(ordinal), ledger_(capacity), source_(std::move(allocator)), holders_(std::move(holders)) {}

  /// Zero bytes give an empty block. Throws PlanError over capacity, and where the device has no more
  /// although the capacity does: others took it. Throws as CallersMemory where that gives the memory.
  MemoryBlock allocate(std::size_t bytes, std::string_view name);
  const MemoryLedger& ledger() const noexcept { return ledger_; }

 private:
  void* take(std::size_t bytes, std::string_view name);
  void give_back(void* data, std::size_t bytes) const noexcept;
  void free(void* data, std::size_t bytes) noexcept;

  const int ordinal_;
  MemoryLedger ledger_;
  const CallersMemory source_;
  const std::function<std::string()> holders_;
};

/// Host memory in large pages near the device, registered in large pieces: each registration costs a call to the
/// driver, and one of everything at once would fail as a whole where there is a limit. Thread-safe. Blocks may outlive
/// it: they share it.
class CudaPinnedMemory : public std::enable_shared_from_this<CudaPinnedMemory> {
 public:
  /// `node` may be null: anywhere. `piece`: bytes registered at once, a multiple of 2 MiB. `advice`: what may help
  /// where the system refuses to pin. `pageable` is told where the rest of a block stays pageable; empty: that is an
  /// error.
  CudaPinnedMemory(int ordinal, std::shared_ptr<const NumaNode> node, std::size_t piece, std::string advice,
                   Notice pageable);

  /// Allocates pinned memory of `bytes` bytes; the system rounds up to whole pages, and provides them on `threads`.
  /// Throws DeviceError.
  MemoryBlock allocate(std::size_t bytes, std::string_view name, Parallel& threads);
  /// Bytes pinned, and bytes that could not be, of the blocks alive.
  std::size_t allocated() const noexcept { return allocated_; }
  std::size_t pageable() const noexcept { return pageable_bytes_; }
  /// How many of the `bytes` at `data` lie in one registered piece, or in none: the driver does not promise copies that
  /// cross from one into the next. All, where the memory is not of this pool.
  std::size_t in_one_piece(const void* data, std::size_t bytes) const;

 private:
  /// A block's registered pieces lie one after the other from its beginning.
  struct Registered {
    std::size_t bytes = 0;
    std::size_t unpinned = 0;  ///< part of `bytes` that is counted as pageable
    std::vector<std::size_t> ends;
    std::size_t pinned() const noexcept { return ends.empty() ? 0 : ends.back(); }
  };

  void pin(std::byte* data, std::size_t bytes, std::string_view name);
  std::string register_pieces(std::byte* data, Registered& block);
  void unregister_last(std::byte* data, Registered& block) noexcept;
  void free(void* data, std::size_t bytes) noexcept;

  const int ordinal_;
  const std::shared_ptr<const NumaNode> node_;
  const std::size_t piece_;
  const std::string advice_;
  const Notice pageable_;
  std::atomic<std::size_t> allocated_{0};
  std::atomic<std::size_t> pageable_bytes_{0};
  mutable std::mutex mutex_;
  std::map<std::uintptr_t, Registered> blocks_;  ///< by first address
};

}  // namespace tandem
