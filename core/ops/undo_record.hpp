#pragma once
// Memory in which updates that may be taken back leave what that takes (core/numerics/undo.hpp).
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/numerics/adam_state.hpp"
#include "core/tensor/layout_quantum.hpp"

namespace tandem {

/// Entries for old bits that codes do not give back, in a block of `layout_quantum` elements; `updated` blocks alone
/// have a record.
struct UndoCounts {
  std::uint16_t m = 0;
  std::uint16_t v = 0;
  std::uint16_t master = 0;
  std::uint16_t updated = 0;
};

/// Blocks that share memory for old bits, and that one thread works on.
constexpr std::int64_t undo_run_blocks = 64;
constexpr std::int64_t undo_run = undo_run_blocks * layout_quantum;

/// Bytes for old bits that are booked for each block.
constexpr std::size_t undo_pool_bytes(StateFormat f) noexcept { return rounds_moments(f) ? 512 : 320; }
/// Old exponents of coded moments, of m and then of v.
constexpr std::size_t undo_exponent_bytes(StateFormat f) noexcept {
  return f == StateFormat::byte_moments ? 2 * static_cast<std::size_t>(layout_quantum / coded_block) : 0;
}
constexpr std::size_t undo_block_bytes(StateFormat f) noexcept {
  return static_cast<std::size_t>(layout_quantum) + undo_exponent_bytes(f) + sizeof(UndoCounts) + undo_pool_bytes(f);
}
/// Bytes of the record of `count` elements, whole blocks. Zeros are the record of nothing.
constexpr std::size_t undo_bytes(StateFormat f, std::int64_t count) noexcept {
  return static_cast<std::size_t>(count / layout_quantum) * undo_block_bytes(f);
}

/// Bytes of an entry for an old moment: its bits, and of one that is rounded the distance from the entry before. One
/// for a master has 4.
constexpr std::size_t undo_moment_bytes(StateFormat f) noexcept {
  return m_bytes(f, coded_record) / coded_record + (rounds_moments(f) ? 1 : 0);
}

/// The record of a run of blocks. Not owned.
class UndoRun {
 public:
  /// Run `index` of the record of `count` elements in `memory`.
  UndoRun(std::byte* memory, StateFormat format, std::int64_t count, std::int64_t index) noexcept
      : format_(format), blocks_(std::min(undo_run_blocks, count / layout_quantum - index * undo_run_blocks)) {
    codes_ = memory + undo_bytes(format, index * undo_run);
  }

  std::int64_t blocks() const noexcept { return blocks_; }
  /// A code for each element of a block.
  std::uint8_t* codes(std::int64_t block) const noexcept { return at<std::uint8_t>(codes_, block, layout_quantum); }
  std::uint8_t* exponents(std::int64_t block) const noexcept {
    return at<std::uint8_t>(codes_ + blocks_ * layout_quantum, block, exponent_bytes());
  }
  UndoCounts& counts(std::int64_t block) const noexcept {
    return *at<UndoCounts>(codes_ + blocks_ * (layout_quantum + exponent_bytes()), block, sizeof(UndoCounts));
  }
  /// Old bits of all blocks, one after another: of each its m, v and masters, in the order of their elements.
  std::byte* pool() const noexcept {
    constexpr auto counts_bytes = static_cast<std::int64_t>(sizeof(UndoCounts));
    return codes_ + blocks_ * (layout_quantum + exponent_bytes() + counts_bytes);
  }
  std::size_t pool_bytes() const noexcept { return static_cast<std::size_t>(blocks_) * undo_pool_bytes(format_); }
  /// Bytes of a block's old bits in the pool.
  std::size_t bytes_of(const UndoCounts& c) const noexcept {
    return (std::size_t{c.m} + c.v) * undo_moment_bytes(format_) + std::size_t{c.master} * sizeof(std::uint32_t);
  }
  /// Offset in the pool of a block's old bits, behind those of the blocks before.
  std::size_t pool_offset(std::int64_t block) const noexcept {
    std::size_t offset = 0;
    for (std::int64_t b = 0; b < block; ++b) offset += bytes_of(counts(b));
    return offset;
  }

 private:
  std::int64_t exponent_bytes() const noexcept { return static_cast<std::int64_t>(undo_exponent_bytes(format_)); }
  template <class T>
  static T* at(std::byte* first, std::int64_t block, std::int64_t each) noexcept {
    return reinterpret_cast<T*>(first + block * each);
  }

  StateFormat format_;
  std::int64_t blocks_;
  std::byte* codes_;
};

/// Operands of an update that may be taken back, beside those of the update. Not owned.
struct UndoPiece {
  std::byte* memory = nullptr;          ///< the record of a range of state, aligned to 64 bytes
  std::int64_t range = 0;               ///< elements of that range
  std::int64_t begin = 0;               ///< first element of the piece within it; whole blocks
  const double* block_norms = nullptr;  ///< sums of squares of the range's gradient, block by block
};

/// Elements of the piece's `count` that have a record.
std::int64_t recorded_elements(const UndoPiece& undo, StateFormat format, std::int64_t count);

}  // namespace tandem
