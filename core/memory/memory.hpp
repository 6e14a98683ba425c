#pragma once
// Named memory: owners of one block, an arena that is carved once, and the plan that lists every
// block before any of them exists.
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace tandem {

/// Alignment of everything carved from an arena, in bytes: wide enough for any vector load, a
/// multiple of a cache line and of CUDA's texture alignment.
constexpr std::size_t arena_alignment = 256;

constexpr std::size_t align_up(std::size_t bytes, std::size_t alignment = arena_alignment) noexcept {
  return (bytes + alignment - 1) / alignment * alignment;
}

namespace literals {
constexpr std::size_t operator""_KiB(unsigned long long n) { return static_cast<std::size_t>(n) << 10; }
constexpr std::size_t operator""_MiB(unsigned long long n) { return static_cast<std::size_t>(n) << 20; }
constexpr std::size_t operator""_GiB(unsigned long long n) { return static_cast<std::size_t>(n) << 30; }
}  // namespace literals

/// Owner of one block of memory, device or host. Move-only; the deleter runs once, and never throws.
class MemoryBlock {
 public:
  using Deleter = std::function<void(void*, std::size_t)>;

  MemoryBlock() = default;
  MemoryBlock(void* data, std::size_t bytes, Deleter deleter);
  MemoryBlock(MemoryBlock&& other) noexcept;
  MemoryBlock& operator=(MemoryBlock&& other) noexcept;
  MemoryBlock(const MemoryBlock&) = delete;
  MemoryBlock& operator=(const MemoryBlock&) = delete;
  ~MemoryBlock();

  void* data() const noexcept { return data_; }
  std::size_t bytes() const noexcept { return bytes_; }
  explicit operator bool() const noexcept { return data_ != nullptr; }

 private:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
  Deleter deleter_;
};

/// Hands out consecutive, aligned parts of one block. Not thread-safe: carve while setting up.
class Arena {
 public:
  Arena() = default;
  /// An arena over `data`, which it does not own; it must be aligned to `arena_alignment` and outlive the arena. Throws
  /// MisuseError where it is not aligned.
  Arena(void* data, std::size_t bytes, std::string name);

  /// The next `bytes` bytes, aligned. Throws MisuseError with both names when the arena is exhausted: the plan and the
  /// carving disagree, which is a fault of the program.
  void* carve(std::size_t bytes, std::string_view what);
  std::size_t used() const noexcept { return used_; }
  std::size_t bytes() const noexcept { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  std::size_t used_ = 0;
  std::string name_;
};

/// Place of a planned block. `file`: on a disk, and in no memory.
enum class Place : std::uint8_t { device, pinned, pageable, file };
std::string_view name_of(Place place) noexcept;

/// One row of a memory plan. `bytes` counts alignment padding.
struct MemoryEntry {
  std::string name;   ///< "weights, streamed", unique within its place
  std::string phase;  ///< "run", or the phase in which alone it is needed: load, train, evaluate, save
  Place place = Place::device;
  std::size_t bytes = 0;
};

/// Memory plan of a run: every byte that it takes, by name. Plain data.
struct MemoryPlan {
  std::vector<MemoryEntry> entries;

  /// Appends an entry of `bytes` rounded up to the arena's alignment; entries of zero bytes are dropped.
  /// Throws MisuseError when the name is taken in that place.
  void add(std::string name, std::string phase, Place place, std::size_t bytes);
  /// Makes the last `bytes` of the pinned entries pageable, all at most: the system refused to pin them. An entry of
  /// which this is a part becomes two.
  void unpin(std::size_t bytes);
  /// Bytes held at most at one time: all of "run" and the largest other phase.
  std::size_t device_bytes() const noexcept;
  std::size_t host_bytes() const noexcept;  ///< pinned and pageable
  std::size_t bytes_in(Place place) const noexcept;
};

/// "1.50 GiB", "512.0 MiB", "100 B".
std::string format_bytes(std::size_t bytes);

}  // namespace tandem
