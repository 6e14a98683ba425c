#include "gpu_ops/device/cuda_device_memory.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <new>
#include <optional>
#include <utility>

#include "core/base/error.hpp"
#include "core/host/mapped_memory.hpp"
#include "core/host/numa_node.hpp"
#include "gpu_ops/device/runtime.hpp"

namespace tandem {

namespace runtime = gpu::runtime;

namespace {

constexpr std::size_t page = 4096;  // registered memory begins at a multiple

}  // namespace

// -- device ------------------------------------------------------------------------------------------

MemoryBlock CudaDeviceMemory::allocate(std::size_t bytes, std::string_view name) {
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
  return {data, bytes, [self = shared_from_this()](void* p, std::size_t n) { self->free(p, n); }};
}

void* CudaDeviceMemory::take(std::size_t bytes, std::string_view name) {
  const runtime::CurrentDevice current(ordinal_);
  if (source_) return source_.take(bytes, name, ledger_.table());
  if (void* data = runtime::allocate(bytes)) return data;
  const auto memory = runtime::free_memory();
  const std::string others = holders_ ? holders_() : std::string();
  throw PlanError(fmt::format("memory of cuda:{} is taken: '{}' needs {}", ordinal_, name, format_bytes(bytes)),
                  fmt::format("{} of {} are free, this run holds: {}{}{}", format_bytes(memory.free),
                              format_bytes(memory.total), ledger_.table(), others.empty() ? "" : "; ", others),
                  "end what else takes it, this program's own included, or lower --device-memory", ledger_.table());
}

void CudaDeviceMemory::give_back(void* data, std::size_t bytes) const noexcept {
  if (!source_) return runtime::free(ordinal_, data);
  std::optional<runtime::CurrentDevice> current;
  try {
    current.emplace(ordinal_);
  } catch (const runtime::RuntimeError&) {  // a lost device: its memory goes back all the same
  }
  source_.give_back(data, bytes);
}

void CudaDeviceMemory::free(void* data, std::size_t bytes) noexcept {
  // Forgotten before it is freed: from then on the device may give the address to another thread.
  ledger_.leave(data);
  give_back(data, bytes);
  // Counted until it is really gone.
  ledger_.unbook(bytes);
}

// -- pinned ------------------------------------------------------------------------------------------

CudaPinnedMemory::CudaPinnedMemory(int ordinal, std::shared_ptr<const NumaNode> node, std::size_t piece,
                                   std::string advice, Notice pageable)
    : ordinal_(ordinal),
      node_(std::move(node)),
      piece_(piece),
      advice_(std::move(advice)),
      pageable_(std::move(pageable)) {}

MemoryBlock CudaPinnedMemory::allocate(std::size_t bytes, std::string_view name, Parallel& threads) {
  if (bytes == 0) return {};
  MemoryBlock block;
  try {
    // Registering would make the pages one after the other.
    void* const data = MappedMemory::provide(bytes, node_.get(), threads);
    block = MemoryBlock(data, bytes, [self = shared_from_this()](void* p, std::size_t n) { self->free(p, n); });
  } catch (const std::bad_alloc&) {
    throw DeviceError(fmt::format("cannot pin {} for '{}'", format_bytes(bytes), name), "the system refuses the memory",
                      "lower --host-memory");
  }
  pin(static_cast<std::byte*>(block.data()), bytes, name);
  return block;
}

void CudaPinnedMemory::pin(std::byte* data, std::size_t bytes, std::string_view name) {
  Registered* block = nullptr;
  {
    const std::lock_guard lock(mutex_);
    block = &blocks_[reinterpret_cast<std::uintptr_t>(data)];
    block->bytes = bytes;
  }
  const std::string refused = register_pieces(data, *block);
  if (refused.empty()) return;
  const std::size_t pinned = pageable_ ? block->pinned() : 0;
  const std::string of_all = pinned == 0 ? std::string() : fmt::format(" of {}", format_bytes(bytes));
  const DeviceError refusal(fmt::format("cannot pin {}{} for '{}'", format_bytes(bytes - pinned), of_all, name),
                            refused, advice_);
  if (!pageable_) throw refusal;
  pageable_(refusal.what());
}

/// Registers pieces from the front, for as long as the system takes them. They halve where it refuses one and the rest
/// may stay pageable. Returns the last refusal; empty where all is registered.
std::string CudaPinnedMemory::register_pieces(std::byte* data, Registered& block) {
  const runtime::CurrentDevice current(ordinal_);
  std::string refused;
  std::size_t piece = piece_;
  while (block.pinned() < block.bytes) {
    const std::size_t done = block.pinned();
    const std::size_t bytes = std::min(piece, block.bytes - done);
    block.ends.reserve(block.ends.size() + 1);
    try {
      runtime::register_host(data + done, bytes);
      block.ends.push_back(done + bytes);
      allocated_ += bytes;
    } catch (const runtime::RuntimeError& error) {
      if (error.lost()) throw;
      refused = error.what();
      piece = bytes / 2 / page * page;
      if (pageable_ && piece >= piece_ / 8) continue;
      // The driver pins memory of its own later, and fails where none can be had.
      if (pageable_) unregister_last(data, block);
      block.unpinned = block.bytes - block.pinned();
      pageable_bytes_ += block.unpinned;
      return refused;
    }
  }
  return {};
}

void CudaPinnedMemory::unregister_last(std::byte* data, Registered& block) noexcept {
  if (block.ends.empty()) return;
  const std::size_t end = block.ends.back();
  block.ends.pop_back();
  runtime::unregister_host(ordinal_, data + block.pinned());
  allocated_ -= end - block.pinned();
}

void CudaPinnedMemory::free(void* data, std::size_t bytes) noexcept {
  Registered block;
  {
    const std::lock_guard lock(mutex_);
    const auto known = blocks_.find(reinterpret_cast<std::uintptr_t>(data));
    if (known != blocks_.end()) {
      block = std::move(known->second);
      blocks_.erase(known);
    }
  }
  pageable_bytes_ -= block.unpinned;
  while (!block.ends.empty()) unregister_last(static_cast<std::byte*>(data), block);
  MappedMemory::unmap(data, bytes);
}

std::size_t CudaPinnedMemory::in_one_piece(const void* data, std::size_t bytes) const {
  const std::uintptr_t address = reinterpret_cast<std::uintptr_t>(data);
  const std::lock_guard lock(mutex_);
  const auto next = blocks_.upper_bound(address);
  if (next == blocks_.begin()) return bytes;
  const auto& [begin, block] = *std::prev(next);
  const std::size_t at = address - begin;
  if (at >= block.bytes) return bytes;
  const auto end = std::upper_bound(block.ends.begin(), block.ends.end(), at);
  return std::min(bytes, (end == block.ends.end() ? block.bytes : *end) - at);
}

}  // namespace tandem
