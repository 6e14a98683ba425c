#pragma once
// Output layer and cross-entropy over chunks of rows: only one chunk's logits exist at a time, and the gradients of a
// few chunks', of which that of the weight is made.
#include "core/ops.hpp"
#include "gpu_ops/matmul.hpp"

namespace tandem::gpu {

/// Rows that exist at once, at least 1.
struct HeadRows {
  std::int64_t logits = 1;
  std::int64_t gradients = 1;  ///< of logits; as many where the latter are fp32, whose place they take
};
/// A function of N, V and the type of activations alone.
HeadRows head_loss_rows(std::int64_t tokens, std::int64_t vocabulary, DType activations);

/// The most of any number of tokens up to so many, of which fewer may come to larger parts.
HeadRows most_head_loss_rows(std::int64_t tokens, std::int64_t vocabulary, DType activations);

/// Device scratch of one call, with gradients or without; grows with each argument.
std::size_t head_loss_scratch(HeadRows at_once, std::int64_t vocabulary, DType activations, bool gradients);

/// Asynchronous. Operands are checked. Gradients of logits are rounded to the type of the activations. Throws as
/// Matmul::run.
void head_loss(const HeadLoss& head, HeadRows at_once, Matmul& matmul, void* matmul_workspace, void* scratch,
               CUstream_st* stream);

}  // namespace tandem::gpu
