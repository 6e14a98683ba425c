#include "core/host/large_copy.hpp"

#include <emmintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace tandem {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool watched = true;
#else
constexpr bool watched = false;
#endif

constexpr std::size_t line_bytes = 64;
constexpr std::size_t page_bytes = 4096;
// Pages that are read in turn: the hardware fetches ahead within each.
constexpr std::size_t pages_at_once = 4;
// Bytes that a thread copies at a time.
constexpr std::size_t part_bytes = std::size_t{1} << 20;

/// One line; `to` is where one begins.
inline void stream_line(std::byte* to, const std::byte* from) noexcept {
  const auto* source = reinterpret_cast<const __m128i*>(from);
  auto* target = reinterpret_cast<__m128i*>(to);
  const __m128i a = _mm_loadu_si128(source);
  const __m128i b = _mm_loadu_si128(source + 1);
  const __m128i c = _mm_loadu_si128(source + 2);
  const __m128i d = _mm_loadu_si128(source + 3);
  _mm_stream_si128(target, a);
  _mm_stream_si128(target + 1, b);
  _mm_stream_si128(target + 2, c);
  _mm_stream_si128(target + 3, d);
}

/// Whole lines from the beginning of one on; returns their bytes.
std::size_t stream(std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
  std::size_t at = 0;
  for (; at + pages_at_once * page_bytes <= bytes; at += pages_at_once * page_bytes) {
    for (std::size_t in_page = 0; in_page < page_bytes; in_page += line_bytes) {
      for (std::size_t p = 0; p < pages_at_once; ++p) {
        const std::size_t offset = at + p * page_bytes + in_page;
        stream_line(to + offset, from + offset);
      }
    }
  }
  for (; at + line_bytes <= bytes; at += line_bytes) stream_line(to + at, from + at);
  _mm_sfence();  // streaming stores are ordered by nothing else
  return at;
}

}  // namespace

void large_copy(void* to, const void* from, std::size_t bytes) noexcept {
  if (watched || bytes < large_copy_bytes) {
    std::memcpy(to, from, bytes);
    return;
  }
  auto* target = static_cast<std::byte*>(to);
  const auto* source = static_cast<const std::byte*>(from);
  const std::size_t head = (line_bytes - reinterpret_cast<std::uintptr_t>(to) % line_bytes) % line_bytes;
  std::memcpy(target, source, head);
  const std::size_t streamed = head + stream(target + head, source + head, bytes - head);
  std::memcpy(target + streamed, source + streamed, bytes - streamed);
}

void large_copy(void* to, const void* from, std::size_t bytes, Parallel& threads) {
  if (bytes <= part_bytes) return large_copy(to, from, bytes);
  const std::size_t parts = (bytes + part_bytes - 1) / part_bytes;
  threads.run(static_cast<std::int64_t>(parts), [=](std::int64_t part) {
    const std::size_t at = static_cast<std::size_t>(part) * part_bytes;
    large_copy(static_cast<std::byte*>(to) + at, static_cast<const std::byte*>(from) + at,
               std::min(part_bytes, bytes - at));
  });
}

}  // namespace tandem
