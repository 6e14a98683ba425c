#pragma once
// Memory that goes past the page cache.
#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>

namespace tandem {

/// Of memory, lengths and places in the file, where the page cache is passed by: no disk has larger blocks.
constexpr std::size_t direct_block_bytes = 4096;

struct FreeDirectBuffer {
  void operator()(std::byte* data) const noexcept { std::free(data); }
};
using DirectBuffer = std::unique_ptr<std::byte, FreeDirectBuffer>;

/// Whole blocks. Throws std::bad_alloc.
inline DirectBuffer make_direct_buffer(std::size_t bytes) {
  DirectBuffer buffer(static_cast<std::byte*>(std::aligned_alloc(direct_block_bytes, bytes)));
  if (!buffer) throw std::bad_alloc();
  return buffer;
}

}  // namespace tandem
