#pragma once
// Copies within the memory of the host.
#include <cstddef>

#include "core/host/parallel.hpp"

namespace tandem {

/// Copies like memcpy, but large blocks bypass the caches: a store that first fetches the line it will overwrite takes
/// a third of the memory's bandwidth for nothing, and evicts data in use. Other threads see the bytes after whatever
/// orders this thread's writes for them. Under ASan and TSan it is memcpy, which they watch.
void large_copy(void* to, const void* from, std::size_t bytes) noexcept;
/// large_copy on several threads at once: one alone does not fill the memory's bandwidth. Blocks.
void large_copy(void* to, const void* from, std::size_t bytes, Parallel& threads);

/// Size in bytes from which copies bypass the caches.
constexpr std::size_t large_copy_bytes = std::size_t{512} << 10;

}  // namespace tandem
