#pragma once
// Arithmetic of the optimizer step on flat arrays: every implementation gives the same bits.
#include <cstdint>

#include "core/host/parallel.hpp"
#include "core/numerics/adam.hpp"
#include "core/numerics/adam_state.hpp"
#include "core/numerics/bf16.hpp"
#include "core/ops/undo_record.hpp"
#include "core/tensor/layout_quantum.hpp"

namespace tandem {

/// The end of updates that ran before they were decided on.
enum class Settling : std::uint8_t {
  confirm,  ///< they stay; blocks that were left alone are updated now
  redo,     ///< they are taken back, and all blocks updated by other coefficients
  retract,  ///< they are taken back
};

/// Synchronous kernels over host memory, parallel inside. Thread-safe for disjoint data. An exception in a worker is
/// rethrown to the caller.
class UpdateKernels {
 public:
  virtual ~UpdateKernels() = default;

  /// The optimizer of the piece's format, AdamW or Lion, on every element: core/numerics/adam_state.hpp. On at most so
  /// many threads; 0: on all.
  virtual void adamw(const AdamPiece& piece, const AdamCoefficients& c, int most_threads = 0) = 0;
  /// adamw() on the blocks of the piece whose gradient is finite and whose record fits `undo`; leaves the others alone.
  /// The piece is whole blocks that have no record, of a format of AdamW; `c` is numerics::is_invertible. Pieces of one
  /// range of state come in ascending order. Returns how many elements were updated.
  virtual std::int64_t speculate(const AdamPiece& piece, const AdamCoefficients& c, const UndoPiece& undo,
                                 int most_threads = 0) = 0;
  /// Ends what speculate() began with the same operands and the coefficients `speculated`: afterwards the piece is as
  /// adamw() with `actual` leaves it, or, retracted, as it was before, and no block has a record. To confirm, both
  /// coefficients are the same.
  virtual void settle(const AdamPiece& piece, const AdamCoefficients& speculated, const AdamCoefficients& actual,
                      Settling settling, const UndoPiece& undo, int most_threads = 0) = 0;
  /// weight[i] = master[i] rounded ties away from zero.
  virtual void weights_of_master(const float* master, bf16* weight, std::int64_t count) = 0;
  /// sum[i] = gradient[i] where `first`, else sum[i] + gradient[i]; fp32.
  virtual void accumulate(float* sum, const bf16* gradient, bool first, std::int64_t count) = 0;
  virtual void accumulate(float* sum, const float* gradient, bool first, std::int64_t count) = 0;
  /// gradient[i] = sum[i] rounded to nearest even.
  virtual void round(const float* sum, bf16* gradient, std::int64_t count) = 0;
  /// partial[b] = sum of squares of block b of `layout_quantum` elements, see
  /// core/numerics/norm_block.hpp; the last block may be short.
  virtual void norm_blocks(const bf16* gradient, std::int64_t count, double* partial) = 0;
  virtual void norm_blocks(const float* gradient, std::int64_t count, double* partial) = 0;
  /// The threads that the kernels run on, also for other work on host memory: they are near it.
  virtual Parallel& parallel() noexcept = 0;
  int threads() noexcept { return parallel().threads(); }
  /// Codes of a matrix in e4m3, rounded whole as Ops::quantize does. `exponent`: a guess at that of its scale, with
  /// which one pass over the weights is enough where it is right. Returns the exponent e: a weight is its code times
  /// 2^e. Where some weight is not finite all codes are NaN, and e is 0. Threads as for adamw().
  virtual int fp8_codes(const bf16* weight, std::int64_t count, int exponent, std::uint8_t* codes,
                        int most_threads = 0) = 0;
};

}  // namespace tandem
