#include "gpu_ops/cuda_device_memory.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <new>
#include <utility>

#include "core/error.hpp"
#include "core/mapped_memory.hpp"
#include "core/numa_node.hpp"
#include "gpu_ops/runtime.hpp"

namespace tandem {

namespace runtime = gpu::runtime;

// -- device ------------------------------------------------------------------------------------------

MemoryBlock CudaDeviceMemory::allocate(std::size_t bytes, std::string_view name) {
  if (bytes == 0) return {};
  ledger_.book(bytes, name);
  void* data = nullptr;
  try {
    data = take(bytes, name);
    ledger_.enter(data, bytes, name);
  } catch (...) {
    if (data != nullptr) runtime::free(ordinal_, data);
    ledger_.unbook(bytes);
    throw;
  }
  return {data, bytes, [self = shared_from_this()](void* p, std::size_t n) { self->free(p, n); }};
}

void* CudaDeviceMemory::take(std::size_t bytes, std::string_view name) {
  const runtime::CurrentDevice current(ordinal_);
  if (void* data = runtime::allocate(bytes)) return data;
  const auto memory = runtime::free_memory();
  const std::string others = holders_ ? holders_() : std::string();
  throw PlanError(fmt::format("memory of cuda:{} is taken: '{}' needs {}", ordinal_, name, format_bytes(bytes)),
                  fmt::format("{} of {} are free, this run holds: {}{}{}", format_bytes(memory.free),
                              format_bytes(memory.total), ledger_.table(), others.empty() ? "" : "; ", others),
                  "end what else takes it, this program's own included, or lower --device-memory", ledger_.table());
}

void CudaDeviceMemory::free(void* data, std::size_t bytes) noexcept {
  // Forgotten before it is freed: from then on the device may give the address to another thread.
  ledger_.leave(data);
  runtime::free(ordinal_, data);
  // Counted until it is really gone.
  ledger_.unbook(bytes);
}

// -- pinned ------------------------------------------------------------------------------------------

CudaPinnedMemory::CudaPinnedMemory(int ordinal, std::shared_ptr<const NumaNode> node, std::size_t piece,
                                   Notice pageable)
    : ordinal_(ordinal), node_(std::move(node)), piece_(piece), pageable_(std::move(pageable)) {}

MemoryBlock CudaPinnedMemory::allocate(std::size_t bytes, std::string_view name, Parallel& threads) {
  if (bytes == 0) return {};
  const std::string what = fmt::format("cannot pin {} for '{}'", format_bytes(bytes), name);
  std::byte* data = nullptr;
  try {
    // Registering would make the pages one after the other.
    data = static_cast<std::byte*>(MappedMemory::provide(bytes, node_.get(), threads));
  } catch (const std::bad_alloc&) {
    throw DeviceError(what, "the system refuses the memory", "lower --host-memory");
  }
  try {
    if (!pin(data, bytes, what)) return {data, bytes, [](void* p, std::size_t n) { MappedMemory::unmap(p, n); }};
  } catch (...) {
    MappedMemory::unmap(data, bytes);
    throw;
  }
  return {data, bytes, [self = shared_from_this()](void* p, std::size_t n) { self->free(p, n); }};
}

/// False where the system refuses and that is none of the caller's concern.
bool CudaPinnedMemory::pin(std::byte* data, std::size_t bytes, const std::string& what) {
  try {
    register_pieces(data, bytes);
  } catch (const runtime::RuntimeError& error) {
    if (error.lost()) throw;
    const DeviceError refusal(what, error.what(),
                              "lower --host-memory, or raise the limit of locked memory (ulimit -l)");
    if (!pageable_) throw refusal;
    pins_ = false;
    pageable_(refusal.what());
    return false;
  }
  try {
    const std::lock_guard lock(mutex_);
    blocks_.emplace(reinterpret_cast<std::uintptr_t>(data), bytes);
  } catch (...) {
    unregister_pieces(data, bytes);
    throw;
  }
  allocated_ += bytes;
  return true;
}

void CudaPinnedMemory::register_pieces(std::byte* data, std::size_t bytes) {
  const runtime::CurrentDevice current(ordinal_);
  std::size_t done = 0;
  try {
    for (; done < bytes; done += piece_) runtime::register_host(data + done, std::min(piece_, bytes - done));
  } catch (...) {
    unregister_pieces(data, done);
    throw;
  }
}

void CudaPinnedMemory::unregister_pieces(std::byte* data, std::size_t bytes) noexcept {
  for (std::size_t done = 0; done < bytes; done += piece_) runtime::unregister_host(ordinal_, data + done);
}

void CudaPinnedMemory::free(void* data, std::size_t bytes) noexcept {
  {
    const std::lock_guard lock(mutex_);
    blocks_.erase(reinterpret_cast<std::uintptr_t>(data));
  }
  unregister_pieces(static_cast<std::byte*>(data), bytes);
  MappedMemory::unmap(data, bytes);
  allocated_ -= bytes;
}

std::size_t CudaPinnedMemory::in_one_piece(const void* data, std::size_t bytes) const {
  const std::uintptr_t address = reinterpret_cast<std::uintptr_t>(data);
  const std::lock_guard lock(mutex_);
  const auto next = blocks_.upper_bound(address);
  if (next == blocks_.begin()) return bytes;
  const auto& [begin, size] = *std::prev(next);
  if (address - begin >= size) return bytes;
  return std::min(bytes, piece_ - (address - begin) % piece_);
}

}  // namespace tandem
