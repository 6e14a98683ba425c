#pragma once
// Entries for rounded moments that a block has lost, by instructions that compress vectors of bytes.
#include <cstddef>
#include <cstdint>

#include "cpu_ops/update/undo_kernels.hpp"

namespace tandem::kernels {

/// Entries that were written.
struct Written {
  std::byte* end = nullptr;
  std::int64_t count = 0;
};

/// Bytes behind the last entry that may be written too.
constexpr std::size_t entries_slack = 64;

/// Writes entries of moments of 8 or 16 bits. Needs AVX-512 with VBMI2. Returns no end, with nothing written, where an
/// element may be so far from the one before that this takes several entries.
template <class Word>
Written put_near_entries_avx512(std::byte* to, const OldMoment& old);

}  // namespace tandem::kernels
