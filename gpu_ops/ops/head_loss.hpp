#pragma once
// Output layer and cross-entropy over chunks of rows: only one chunk's logits exist at a time, and the gradients of a
// few chunks', of which that of the weight is made.
#include "core/ops/ops.hpp"
#include "gpu_ops/base/matmul.hpp"
#include "gpu_ops/base/scratch.hpp"

namespace tandem::gpu {

HeadShape shape_of(const HeadLoss& head);

/// A bf16 `dweight` that is written at once wants all rows' gradients at once. Asynchronous. Operands are checked.
/// Gradients of logits are rounded to the type of the activations. Throws as Matmul::run.
void head_loss(const HeadLoss& head, const HeadRows& at_once, Matmul& matmul, void* matmul_workspace, void* scratch,
               CUstream_st* stream);

}  // namespace tandem::gpu
