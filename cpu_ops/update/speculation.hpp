#pragma once
// Updates that may be taken back, block by block.
#include "core/host/isa.hpp"
#include "core/ops/undo_record.hpp"
#include "core/ops/update_kernels.hpp"

namespace tandem::kernels {

/// AdamW on a piece by the kernel of an instruction set, on the calling thread.
void adamw_dispatched(Isa isa, const AdamPiece& piece, const AdamCoefficients& c);

/// Blocks of one run of a record, on the calling thread. `piece` is of whole blocks, and begins with block `first` of the run.
struct RunPiece {
  const AdamPiece& piece;
  UndoRun run;
  std::int64_t first = 0;
  const double* block_norms = nullptr;  ///< sums of squares of the run's gradient, block by block
};

/// Updates the blocks whose gradient is finite and whose record fits. Returns how many elements that were.
std::int64_t speculate(Isa isa, const RunPiece& p, const AdamCoefficients& c);
/// Ends what speculate() began; see UpdateKernels::settle.
void settle(Isa isa, const RunPiece& p, const AdamCoefficients& speculated, const AdamCoefficients& actual,
            Settling settling);

}  // namespace tandem::kernels
