#pragma once
// Files past the page cache, and the memory for them.
#include <fcntl.h>

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>

namespace tandem {

/// Alignment in bytes of memory, lengths and file offsets for direct I/O, which bypasses the page cache: no disk has
/// larger blocks.
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

/// Whether an open file is read and written past the page cache from now on, or, without `direct`, through it. False
/// where its file system cannot do that, which some say only as they are asked to move bytes.
inline bool set_direct(int fd, bool direct) noexcept {
  const int flags = ::fcntl(fd, F_GETFL);
  return flags >= 0 && ::fcntl(fd, F_SETFL, direct ? flags | O_DIRECT : flags & ~O_DIRECT) == 0;
}

}  // namespace tandem
