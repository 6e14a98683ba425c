#pragma once
// Launch geometry and index arithmetic: plain functions, tested on the CPU for sizes up to 2^40 elements.
// Grids are one-dimensional. Nothing here asks the device: how a sum is cut into blocks must not depend on
// how many processors a card has.
#include <cstddef>
#include <cstdint>

namespace tandem::gpu {

/// Lanes that run together and exchange values without shared memory.
constexpr int warp_lanes = 32;
/// Most threads of one block, in any kernel of ours.
constexpr int most_threads = 256;
constexpr int most_warps = most_threads / warp_lanes;
/// Most blocks of a launch of kernels that reach what lies beyond by strides of the grid. Several times what the
/// largest card holds at once, so that the last blocks to finish are a small part.
constexpr std::int64_t most_blocks = 8192;
/// Shared memory of a block, bytes: what a launch has without asking for more, its static arrays counted; what these
/// may take beside dynamic memory; and the most that every card has which these kernels run on (compute
/// capability 8.6).
constexpr std::size_t shared_without_asking = std::size_t{48} << 10;
constexpr std::size_t static_beside_dynamic = std::size_t{1} << 10;
constexpr std::size_t most_shared = std::size_t{99} << 10;
/// Elements that one thread takes at once: 16 bytes of bf16, twice 16 bytes of fp32.
constexpr int packet = 8;

/// Size of one launch.
struct Geometry {
  std::int64_t grid = 0;         ///< blocks; 0: nothing to do, nothing is launched
  int block = 0;                 ///< threads of a block, a multiple of `warp_lanes`
  std::size_t shared_bytes = 0;  ///< dynamic shared memory of a block
};

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

/// Divides numbers below 2^31 by one that is known before the launch, by a multiplication (Granlund and Montgomery
/// 1994, "Division by Invariant Integers using Multiplication", theorem 4.2).
struct Divisor {
  std::uint32_t number = 0;
  std::uint32_t factor = 0;  ///< 2^shift over the number, rounded up
  int shift = 0;

  constexpr std::uint32_t quotient(std::uint32_t dividend) const {
    return static_cast<std::uint32_t>((static_cast<std::uint64_t>(dividend) * factor) >> shift);
  }
  constexpr std::uint32_t remainder(std::uint32_t dividend) const { return dividend - quotient(dividend) * number; }
};
/// Divisor for `number`, 1 to 2^31.
constexpr Divisor divisor_of(std::uint32_t number) {
  int shift = 31;
  while ((std::uint64_t{1} << (shift - 31)) < number) ++shift;
  return {number, static_cast<std::uint32_t>(((std::uint64_t{1} << shift) + number - 1) / number), shift};
}

/// Blocks for `items` of which a block takes `per_block` at once, by strides of the grid.
constexpr std::int64_t blocks_for(std::int64_t items, std::int64_t per_block) {
  const std::int64_t wanted = ceil_div(items, per_block);
  return wanted < most_blocks ? wanted : most_blocks;
}

/// One thread for each packet of `count` elements.
constexpr Geometry pointwise_geometry(std::int64_t count) {
  return {blocks_for(ceil_div(count, packet), most_threads), most_threads};
}

/// One block for each row of `channels` elements: as many threads as the row has packets.
constexpr Geometry row_geometry(std::int64_t rows, std::int64_t channels) {
  const std::int64_t warps = ceil_div(ceil_div(channels, packet), warp_lanes);
  return {blocks_for(rows, 1),
          warp_lanes * static_cast<int>(warps < 1 ? 1 : (warps < most_warps ? warps : most_warps))};
}

/// Rows that a block takes at once where a warp takes one: few, since lanes that hold a row take many registers, and a
/// multiprocessor gives them out by the block.
constexpr int warp_row_warps = 4;
constexpr int warp_row_threads = warp_row_warps * warp_lanes;

/// One warp for each row.
constexpr Geometry warp_row_geometry(std::int64_t rows) { return {blocks_for(rows, warp_row_warps), warp_row_threads}; }

/// Offset of element `at`, a multiple of a packet, of a row in a tile of shared memory whose rows are `dim` elements of
/// 2 bytes, 32 or a multiple of 64. The place of a packet in its row depends on the row, so that the packets of eight
/// rows, which are read at once, lie in different banks.
constexpr int tile_offset(int dim, int row, int at) {
  return row * dim + (at ^ (dim < 64 ? row / 2 % (packet / 2) : row % packet) * packet);
}

/// An extent cut into `parts` pieces of `size` (the last one shorter): a function of both arguments alone.
struct Cut {
  std::int64_t parts = 0;
  std::int64_t size = 0;
};

/// Cut of an extent into at most `most_parts` pieces of at least `least_size`.
constexpr Cut cut(std::int64_t extent, std::int64_t most_parts, std::int64_t least_size) {
  if (extent <= 0) return {};
  const std::int64_t even = ceil_div(extent, most_parts);
  const std::int64_t size = even < least_size ? least_size : even;
  return {ceil_div(extent, size), size};
}

/// Most tiles that `rows` come to, cut into tiles of `size` from where each of `experts` begins.
constexpr std::int64_t most_expert_tiles(std::int64_t rows, std::int64_t experts, std::int64_t size) {
  const std::int64_t begun = rows < experts ? rows : experts;
  return (rows + begun * (size - 1)) / size;
}

/// Parts into which sums over rows are cut at most, where columns are summed alone: enough blocks for a card, few
/// enough for the scratch.
constexpr std::int64_t most_column_parts = 64;
/// Channels of the longest row that the backward of a norm holds in registers, a block for it.
constexpr std::int64_t longest_held_norm = std::int64_t{4} * packet * most_threads;
/// Channels of a row that a warp holds in registers in the backward of a norm.
constexpr std::int64_t warp_norm_channels = packet * warp_lanes;
/// Most parts into which that backward cuts rows, a block for each: two for each multiprocessor of an H100, which hold
/// enough on its way for its memory; with more, some would begin when others end.
constexpr std::int64_t most_norm_parts = 256;
constexpr Cut norm_cut(std::int64_t rows, std::int64_t channels) {
  return cut(rows, most_norm_parts, channels <= warp_norm_channels ? most_warps : 1);
}

}  // namespace tandem::gpu
