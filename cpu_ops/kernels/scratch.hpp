#pragma once
// Scratch memory of the fast kernels: lent by the caller, cut into one part for each worker.
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "core/host/parallel.hpp"
#include "core/memory/memory.hpp"

namespace tandem::fast {

/// Memory lent to kernels for the length of a call. Not owned; aligned to `arena_alignment`.
struct Workspace {
  std::byte* data = nullptr;
  std::size_t bytes = 0;

  /// The workspace behind the first `taken` bytes (rounded up to the alignment).
  Workspace after(std::size_t taken) const;
  /// Throws MisuseError where fewer than `needed` bytes were lent.
  void require(std::size_t needed) const;
};

/// Hands out consecutive arrays of one worker's part.
class Scratch {
 public:
  explicit Scratch(std::byte* at) : at_(at) {}

  float* floats(std::int64_t count) {
    float* const taken = reinterpret_cast<float*>(at_);
    at_ += bytes_of(count);
    return taken;
  }
  /// Bytes that `floats(count)` takes.
  static constexpr std::size_t bytes_of(std::int64_t count) {
    return align_up(static_cast<std::size_t>(count) * sizeof(float));
  }

 private:
  std::byte* at_;
};

/// Runs body(tile, Scratch) for every tile on all threads; each worker owns `bytes_each` of scratch,
/// a multiple of `arena_alignment`, and takes the next tile when it is done with one.
template <class Body>
void for_tiles(Parallel& parallel, std::int64_t tiles, const Workspace& workspace, std::size_t bytes_each,
               const Body& body) {
  const std::int64_t workers = std::min<std::int64_t>(parallel.threads(), tiles);
  workspace.require(static_cast<std::size_t>(workers) * bytes_each);
  std::atomic<std::int64_t> next{0};
  parallel.run(workers, [&](std::int64_t worker) {
    std::byte* const part = workspace.data + static_cast<std::size_t>(worker) * bytes_each;
    for (std::int64_t tile = next.fetch_add(1); tile < tiles; tile = next.fetch_add(1)) body(tile, Scratch(part));
  });
}

/// An extent cut into `count` nearly equal blocks of at most `most`: a function of both alone.
struct Blocks {
  std::int64_t extent;
  std::int64_t count;
  std::int64_t size;

  /// The size is rounded up to a multiple of `multiple`, which divides `most`.
  Blocks(std::int64_t whole, std::int64_t most, std::int64_t multiple = 1);
  std::int64_t begin(std::int64_t i) const { return i * size; }
  std::int64_t length(std::int64_t i) const { return std::min(size, extent - i * size); }
};

/// Runs body(begin, length) over [0, count) in pieces of `at_once`, without scratch.
template <class Body>
void for_ranges(Parallel& parallel, std::int64_t count, std::int64_t at_once, const Body& body) {
  parallel.run((count + at_once - 1) / at_once,
               [&](std::int64_t i) { body(i * at_once, std::min(at_once, count - i * at_once)); });
}

}  // namespace tandem::fast
