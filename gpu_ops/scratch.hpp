#pragma once
// How much device memory the ops of a GPU take as scratch, call by call and all together: plain functions of shapes.
// Builds without CUDA have them too (tandem_gpu_scratch), so that a run on a GPU can be planned anywhere.
#include <cstddef>
#include <cstdint>

#include "core/ops.hpp"

namespace tandem::gpu {

// -- head_loss.hpp -------------------------------------------------------------------------------------------------
/// Rows that exist at once, at least 1.
struct HeadRows {
  std::int64_t logits = 1;
  std::int64_t gradients = 1;  ///< of logits; as many where the latter are fp32, whose place they take
};
/// A function of N, V, the type of activations and of whether the weight's gradient is written `whole`, of all rows at
/// once, alone.
HeadRows head_loss_rows(std::int64_t tokens, std::int64_t vocabulary, DType activations, bool whole);
/// The most of any number of tokens up to so many, of which fewer may come to larger parts.
HeadRows most_head_loss_rows(std::int64_t tokens, std::int64_t vocabulary, DType activations, bool whole);
/// Elements from one row of logits to the next: rows begin at multiples of 16 bytes, whatever the vocabulary.
std::int64_t logit_stride(std::int64_t vocabulary);
std::size_t logit_bytes(std::int64_t rows, std::int64_t vocabulary, DType dtype);
/// Of one call, with gradients or without; with `token_rows`, of gradients of all rows, also so many columns of them.
/// Grows with each argument.
std::size_t head_loss_scratch(HeadRows at_once, std::int64_t vocabulary, DType activations, bool gradients,
                              bool token_rows = false);
/// Elements from one row of those columns to the next.
std::int64_t token_columns_stride(std::int64_t tokens);
std::size_t token_columns_bytes(std::int64_t tokens, DType activations);

// -- kernels.hpp ---------------------------------------------------------------------------------------------------
/// Of norm_backward over rows of up to `channels` channels.
std::size_t norm_backward_scratch(std::int64_t channels);
/// Of sums over rows of up to `channels` columns.
std::size_t column_sums_scratch(std::int64_t channels);

// -- attention.hpp -------------------------------------------------------------------------------------------------
/// Of plain_attention_backward over `tokens` = B T.
std::size_t plain_attention_scratch(std::int64_t tokens, std::int64_t heads);
/// Of a call that is cuDNN's where that takes it: statistics that nobody asked for, then the library's workspace; or
/// what the plain kernels take.
std::size_t cudnn_attention_scratch(const AttentionShape& shape, DType activations);

// -- matmul.hpp ----------------------------------------------------------------------------------------------------
/// Of every product by cuBLASLt.
constexpr std::size_t cublaslt_workspace = std::size_t{32} << 20;

// -- all of them ---------------------------------------------------------------------------------------------------
/// The largest call of attention that a model within `needs` makes.
AttentionShape largest_attention(const WorkspaceNeeds& needs);
/// Of all calls within `needs`: the front belongs to matrix products, the rest to one kernel at a time. `matmul`,
/// `attention`: what a product and the largest call of attention take.
std::size_t ops_scratch(const WorkspaceNeeds& needs, std::size_t matmul, std::size_t attention);

/// Rules of CudaOps on a card whose products leave GELU to kernels, as GeForce cards' do, with cuBLASLt and cuDNN.
class TypicalRules final : public OpsRules {
 public:
  std::size_t workspace_bytes(const WorkspaceNeeds& needs) const override;
};

}  // namespace tandem::gpu
