#pragma once
// Output layer and cross-entropy over chunks of rows: only one chunk's logits exist at a time.
#include "core/ops.hpp"
#include "gpu_ops/matmul.hpp"

namespace tandem::gpu {

/// Rows of logits that exist at once: a function of N and V alone, at least 1.
std::int64_t head_loss_rows(std::int64_t tokens, std::int64_t vocabulary);

/// Device scratch of one call over at most `tokens`; grows with each argument.
std::size_t head_loss_scratch(std::int64_t tokens, std::int64_t vocabulary, DType activations);

/// Asynchronous. Operands are checked. Gradients of logits are rounded to the type of the activations. Throws as
/// Matmul::run.
void head_loss(const HeadLoss& head, Matmul& matmul, void* matmul_workspace, void* scratch, CUstream_st* stream);

}  // namespace tandem::gpu
