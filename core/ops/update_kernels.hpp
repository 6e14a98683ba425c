#pragma once
// Arithmetic of the optimizer step on flat arrays: every implementation gives the same bits.
#include <cstdint>

#include "core/host/parallel.hpp"
#include "core/numerics/adam.hpp"
#include "core/numerics/adam_state.hpp"
#include "core/numerics/bf16.hpp"
#include "core/tensor/layout_quantum.hpp"

namespace tandem {

/// Synchronous kernels over host memory, parallel inside. Thread-safe for disjoint data. An exception in a worker is
/// rethrown to the caller.
class UpdateKernels {
 public:
  virtual ~UpdateKernels() = default;

  /// The optimizer of the piece's format, AdamW or Lion, on every element: core/numerics/adam_state.hpp. On at most so
  /// many threads; 0: on all.
  virtual void adamw(const AdamPiece& piece, const AdamCoefficients& c, int most_threads = 0) = 0;
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
};

}  // namespace tandem
