#pragma once
// AdamW and the norm, hand-vectorised, for one instruction set and one thread each. All give the bits of
// core/numerics; elements that do not fill a vector go through those formulas themselves.
#include "core/update_kernels.hpp"

namespace tandem::kernels {

void adamw_scalar(const AdamPiece& piece, const AdamCoefficients& c);
void adamw_avx2(const AdamPiece& piece, const AdamCoefficients& c);
void adamw_avx512(const AdamPiece& piece, const AdamCoefficients& c);

/// Elements [begin, end) by the formula of core/numerics.
void adamw_between(std::int64_t begin, std::int64_t end, const AdamPiece& piece, const AdamCoefficients& c);

/// Elements that a vector kernel draws random bits for at once.
constexpr std::int64_t random_run = 32;
/// Elements before the first that begins such a run, where the format draws any.
std::int64_t unaligned_head(const AdamPiece& piece);

/// The generator's keys of each round, zero-extended to the 64-bit lanes that vector kernels keep two words in.
struct RoundKey {
  std::uint64_t word0 = 0;
  std::uint64_t word1 = 0;
};
struct RoundKeys {
  explicit RoundKeys(std::uint64_t seed);
  RoundKey of[numerics::philox_fewest_rounds];
};

/// A format as a type, and the way from the value to it.
template <StateFormat format>
struct Format {};
template <class Body>
void with_format(StateFormat format, const Body& body) {
  switch (format) {
    case StateFormat::fp32: return body(Format<StateFormat::fp32>());
    case StateFormat::split: return body(Format<StateFormat::split>());
    case StateFormat::bf16_moments: return body(Format<StateFormat::bf16_moments>());
  }
}

double norm_block_avx2(const bf16* gradient, std::int64_t count);
double norm_block_avx512(const bf16* gradient, std::int64_t count);

/// Adds the last elements, [begin, count) with begin a multiple of 32, to the lanes and folds them: the
/// second half of numerics::norm_block.
double fold_norm_lanes(double* lane, const bf16* gradient, std::int64_t begin, std::int64_t count);

}  // namespace tandem::kernels
