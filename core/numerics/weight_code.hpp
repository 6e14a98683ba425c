#pragma once
// Formats of frozen weights that take fewer bits than bf16, and how many bits and scales each takes.
#include <cstddef>
#include <cstdint>

namespace tandem {

/// How a frozen matrix is stored. `none`: as its values are, in bf16 or f32.
enum class WeightCode : std::uint8_t {
  none,
  int8,        ///< a signed byte an element, one scale a row
  nf4,         ///< four bits an element, one scale for 64 (Dettmers et al., QLoRA, arXiv 2305.14314)
  nf4_double,  ///< nf4 with the scales as bytes themselves, one scale for 256 of those
  fp8          ///< e4m3, one scale for 128 x 128 elements
};

/// Elements that share a scale, of NF4; bytes of scales that share one, where they are coded; sides of a block of FP8.
constexpr std::int64_t nf4_block = 64, nf4_scale_block = 256, fp8_side = 128;

/// Bits of an element's code.
constexpr int code_bits(WeightCode code) noexcept {
  return code == WeightCode::nf4 || code == WeightCode::nf4_double ? 4 : 8;
}

/// Shape of a coded weight: matrices (O, I) one after another, each coded by itself.
struct CodedShape {
  std::int64_t matrices = 1, rows = 0, columns = 0;
  constexpr std::int64_t count() const noexcept { return matrices * rows * columns; }
};

/// Floats that hold the scales of a coded weight. Of nf4_double these are, as bytes, one for each block of each matrix,
/// and then floats: the offset of all scales, and one scale for each nf4_scale_block of those bytes.
constexpr std::int64_t scale_floats(WeightCode code, const CodedShape& of) noexcept {
  const auto parts = [](std::int64_t count, std::int64_t part) { return (count + part - 1) / part; };
  const std::int64_t blocks = of.matrices * parts(of.rows * of.columns, nf4_block);
  switch (code) {
    case WeightCode::none:
      return 0;
    case WeightCode::int8:
      return of.matrices * of.rows;
    case WeightCode::nf4:
      return blocks;
    case WeightCode::nf4_double:
      return parts(blocks, 4) + 1 + parts(blocks, nf4_scale_block);
    case WeightCode::fp8:
      return of.matrices * parts(of.rows, fp8_side) * parts(of.columns, fp8_side);
  }
  return 0;
}

}  // namespace tandem
