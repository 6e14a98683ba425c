#pragma once
// In which order the parts of memory can be copied from where one plan has them to where another wants them,
// within the same blocks, so that nothing is overwritten before it has been copied away. Pure bookkeeping: it
// touches no memory.
#include <cstddef>
#include <cstdint>
#include <vector>

namespace tandem {

/// The engine's two blocks, and a small one beside them.
enum class Space : std::uint8_t { device, host, scratch };

struct PlacedCopy {
  Space from = Space::host;
  Space to = Space::host;
  std::size_t source = 0;  ///< bytes from the beginning of `from`
  std::size_t target = 0;  ///< bytes from the beginning of `to`
  std::size_t bytes = 0;
};

/// Copies which, made one after another, have the effect of making all of `wanted` at once. No copy overlaps
/// itself. Sources of `wanted` must not overlap each other, nor targets; its spaces are device and host.
/// `scratch_bytes` (two halves of it are used) is what cycles and short shifts go through: at least 2. The number of
/// copies is about that of `wanted` plus the bytes in cycles and short shifts over `scratch_bytes`.
/// Throws MisuseError.
std::vector<PlacedCopy> order_copies(const std::vector<PlacedCopy>& wanted, std::size_t scratch_bytes);

}  // namespace tandem
