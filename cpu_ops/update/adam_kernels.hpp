#pragma once
// AdamW, Lion and the norm, hand-vectorised, for one instruction set and one thread each. All give the bits of
// core/numerics; elements that do not fill a vector go through those formulas themselves.
#include "core/ops/update_kernels.hpp"

namespace tandem::kernels {

void adamw_scalar(const AdamPiece& piece, const AdamCoefficients& c);
void adamw_avx2(const AdamPiece& piece, const AdamCoefficients& c);
void adamw_avx512(const AdamPiece& piece, const AdamCoefficients& c);

/// Elements [begin, end) by the formula of core/numerics; of byte_moments `begin` begins a block.
void adamw_between(std::int64_t begin, std::int64_t end, const AdamPiece& piece, const AdamCoefficients& c);

/// Elements that a vector kernel draws random bits for at once.
constexpr std::int64_t random_run = 32;
/// Elements before the first that begins such a run, where the format draws any.
std::int64_t unaligned_head(const AdamPiece& piece);

/// Ends a block of moments whose codes are stored: one with a NaN has a code of its own.
inline void store_exponent(const CodedBlock& block, std::uint32_t exponent, std::uint8_t code_of_nan) {
  *block.exponent = static_cast<std::uint8_t>(exponent);
  if (exponent == numerics::exponent_of_nan) [[unlikely]] {
    for (std::int64_t i = 0; i < coded_block; ++i) block.codes[i] = code_of_nan;
  }
}

/// Keys of a round of the generator, zero-extended to the 64-bit lanes that vector kernels keep two words in.
struct RoundKey {
  std::uint64_t word0 = 0;
  std::uint64_t word1 = 0;
};
/// Constants of the generator in a step: keys of all rounds, and what the first two rounds amount to where blocks'
/// numbers share their upper word. Half of what those would compute is the same for all such blocks.
struct RandomRounds {
  /// Constants for the block of number `first` and for others of its upper word.
  RandomRounds(const AdamCoefficients& c, std::uint64_t first);

  /// Whether the constants are right for `count` blocks from `block` on.
  bool hold_for(std::uint64_t block, std::uint64_t count) const {
    return block >> 32 == upper_word && (block + count - 1) >> 32 == upper_word;
  }

  RoundKey key[numerics::philox_fewest_rounds];
  std::uint64_t step = 0;
  std::uint64_t upper_word = 0;
  // To be combined by exclusive or, two words each:
  std::uint64_t first23 = 0;   ///< with a product, halves exchanged: words 2 and 3 after a round
  std::uint64_t second01 = 0;  ///< with the next product likewise: words 0 and 1 after two
  std::uint64_t second23 = 0;  ///< with word 3 after a round: words 2 and 3 after two
};
/// Number of the block of random bits that a piece begins with.
inline std::uint64_t first_random_block(const AdamPiece& p) {
  return p.index /
         (p.format == StateFormat::byte_moments ? numerics::coded_elements_per_block : numerics::elements_per_block);
}

double norm_block_avx2(const bf16* gradient, std::int64_t count);
double norm_block_avx512(const bf16* gradient, std::int64_t count);

/// Adds the last elements, [begin, count) with begin a multiple of 32, to the lanes and folds them: the
/// second half of numerics::norm_block.
double fold_norm_lanes(double* lane, const bf16* gradient, std::int64_t begin, std::int64_t count);

}  // namespace tandem::kernels
