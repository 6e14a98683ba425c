#pragma once
// AdamW and the norm, hand-vectorised, for one instruction set and one thread each. All give the bits of
// core/numerics; elements that do not fill a vector go through those formulas themselves.
#include "core/update_kernels.hpp"

namespace tandem::kernels {

void adamw_scalar(const AdamPiece& piece, const AdamCoefficients& c);
void adamw_avx2(const AdamPiece& piece, const AdamCoefficients& c);
void adamw_avx512(const AdamPiece& piece, const AdamCoefficients& c);

/// Elements [begin, piece.count) by the formula of core/numerics.
void adamw_from(std::int64_t begin, const AdamPiece& piece, const AdamCoefficients& c);

double norm_block_avx2(const bf16* gradient, std::int64_t count);
double norm_block_avx512(const bf16* gradient, std::int64_t count);

/// Adds the last elements, [begin, count) with begin a multiple of 32, to the lanes and folds them: the
/// second half of numerics::norm_block.
double fold_norm_lanes(double* lane, const bf16* gradient, std::int64_t begin, std::int64_t count);

}  // namespace tandem::kernels
