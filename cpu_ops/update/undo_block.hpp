#pragma once
// AdamW on a block of state, and its record in memory.
#include "core/host/isa.hpp"
#include "core/numerics/undo.hpp"
#include "core/ops/undo_record.hpp"

namespace tandem::kernels {

/// Updates a block of `layout_quantum` elements, of a format of AdamW, as adamw() does and writes its record. `offset`:
/// where the block's old bits begin in the run's pool. Returns false, with the block as it was and without a record,
/// where they do not fit, or a master becomes NaN.
bool update_block(Isa isa, const AdamPiece& piece, const AdamCoefficients& c, const AdamInverse& inverse,
                  const UndoRun& run, std::int64_t index, std::size_t offset);

/// Makes of a block what it was before the update of these coefficients that its record is of.
void take_back(Isa isa, const AdamPiece& piece, const AdamCoefficients& c, const AdamInverse& inverse,
               const UndoRun& run, std::int64_t index, std::size_t offset);

}  // namespace tandem::kernels
