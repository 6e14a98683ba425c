#pragma once
// How an Fp8Matrix lies in the memory of a GPU. cuBLASLt takes factors whose summed elements are neighbours: so a
// matrix that is summed over its rows is stored transposed, and one that is summed either way twice.
#include <cstddef>
#include <cstdint>

#include "core/memory/memory.hpp"
#include "core/ops/ops.hpp"

namespace tandem::gpu {

/// Parts of a tensor whose largest magnitudes are found first, a block for each: the most of them.
constexpr std::int64_t most_fp8_parts = 1024;

/// The magnitude of a MeasuredView: those of its parts, of which who reads them takes the largest. Each block of the
/// launch that finds them writes one, so that nothing must be zero before, and no two blocks write to one place.
struct Largest {
  std::uint32_t parts;                 ///< blocks of that launch
  std::uint32_t part[most_fp8_parts];  ///< as numerics::fp8_magnitude
};

struct Fp8Parts {
  float* scale;              ///< one number, the power of two
  Largest* largest;          ///< magnitude of a tensor that comes without one
  std::uint8_t* codes;       ///< (R, C), or null
  std::uint8_t* transposed;  ///< (C, R), or null
};

constexpr std::size_t fp8_head = arena_alignment + sizeof(Largest);

constexpr std::size_t fp8_bytes(std::int64_t rows, std::int64_t columns, Fp8Sums sums) {
  const std::size_t each = align_up(static_cast<std::size_t>(rows * columns));
  return align_up(fp8_head) + (sums == Fp8Sums::both ? 2 * each : each);
}

inline Fp8Parts parts_of(const Fp8Matrix& m) {
  auto* const base = static_cast<std::byte*>(m.data);
  const auto at = [&](std::size_t offset) { return reinterpret_cast<std::uint8_t*>(base + offset); };
  const std::size_t first = align_up(fp8_head), each = align_up(static_cast<std::size_t>(m.rows * m.columns));
  return {.scale = reinterpret_cast<float*>(base),
          .largest = reinterpret_cast<Largest*>(base + arena_alignment),
          .codes = m.sums == Fp8Sums::rows ? nullptr : at(first),
          .transposed = m.sums == Fp8Sums::columns ? nullptr : at(m.sums == Fp8Sums::both ? first + each : first)};
}

}  // namespace tandem::gpu
