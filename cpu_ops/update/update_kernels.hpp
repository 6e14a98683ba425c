#pragma once
// Optimizer arithmetic on the CPU: one pass over memory, vectorised, the same bits for every
// instruction set and number of threads.
#include <memory>

#include "core/host/isa.hpp"
#include "core/host/parallel.hpp"
#include "core/ops/update_kernels.hpp"

namespace tandem {

/// The best kernels of this processor on the threads of `parallel`. They allocate nothing.
std::unique_ptr<UpdateKernels> make_host_update_kernels(std::shared_ptr<Parallel> parallel);

/// One kernel set for one instruction set, on the calling thread. For tests: `isa` must be one of
/// supported_isas(), else MisuseError.
void adamw_with(Isa isa, const AdamPiece& piece, const AdamCoefficients& c);
/// UpdateKernels::speculate and settle.
std::int64_t speculate_with(Isa isa, const AdamPiece& piece, const AdamCoefficients& c, const UndoPiece& undo);
void settle_with(Isa isa, const AdamPiece& piece, const AdamCoefficients& speculated, const AdamCoefficients& actual,
                 Settling settling, const UndoPiece& undo);
void norm_blocks_with(Isa isa, const bf16* gradient, std::int64_t count, double* partial);
void weights_of_master_with(Isa isa, const float* master, bf16* weight, std::int64_t count);
void accumulate_with(Isa isa, float* sum, const bf16* gradient, bool first, std::int64_t count);
/// Codes under the scale 2^exponent alone; returns the largest magnitude.
std::uint32_t encode_with(Isa isa, const bf16* weight, int exponent, std::uint8_t* codes, std::int64_t count);
void round_with(Isa isa, const float* sum, bf16* gradient, std::int64_t count);

}  // namespace tandem
