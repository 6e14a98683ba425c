#pragma once
// How much device memory the ops of a GPU take as scratch, call by call and all together: plain functions of shapes.
// Builds without CUDA have them too (tandem_gpu_scratch), so that a run on a GPU can be planned anywhere.
#include <cstddef>
#include <cstdint>

#include "core/ops/ops.hpp"

namespace tandem::gpu {

// -- head_loss.hpp -------------------------------------------------------------------------------------------------
/// A call's sizes, or what calls within some needs may have.
struct HeadShape {
  std::int64_t tokens = 0;  ///< N
  std::int64_t vocabulary = 0;
  DType activations = DType::f32;
  std::int64_t written = 0;  ///< rows of a bf16 `dweight` that are written at once; 0: there is none
  bool gradients = true;
  bool token_rows = false;  ///< whether rows of tokens are asked for; only where all are written at once
  bool whole() const noexcept { return written >= vocabulary; }
  bool in_slices() const noexcept { return written > 0 && !whole(); }
};
/// Rows that exist at once, at least 1.
struct HeadRows {
  std::int64_t logits = 1;
  std::int64_t gradients = 1;     ///< rows of gradients of logits; fp32 gradients take the memory of their logits
  std::int64_t slice_logits = 1;  ///< rows of logits from which the rows of `dweight` written at once are computed
};
/// A function of the shape alone. Of a `dweight` written whole the gradients of all rows exist at once.
HeadRows head_loss_rows(const HeadShape& shape);
/// The most of any number of tokens up to so many, of which fewer may come to larger parts.
HeadRows most_head_loss_rows(const HeadShape& shape);
/// Elements from one row of logits to the next: rows begin at multiples of 16 bytes, whatever the vocabulary.
std::int64_t logit_stride(std::int64_t vocabulary);
std::size_t logit_bytes(std::int64_t rows, std::int64_t vocabulary, DType dtype);
/// Bytes of scratch of one head_loss call; with `token_rows` also N columns of the gradients of all rows. Grows with
/// each of its sizes.
std::size_t head_loss_scratch(const HeadRows& at_once, const HeadShape& shape);
/// Bytes at the beginning of that scratch that a `dweight` in slices keeps for all rows: two floats each.
std::size_t row_scales_bytes(const HeadShape& shape);
/// Elements from one row of those columns to the next.
std::int64_t token_columns_stride(std::int64_t tokens);
std::size_t token_columns_bytes(std::int64_t tokens, DType activations);

// -- kernels.hpp ---------------------------------------------------------------------------------------------------
/// Bytes of scratch of norm_backward over rows of up to `channels` channels.
std::size_t norm_backward_scratch(std::int64_t channels);
/// Bytes of scratch of sums over rows of up to `channels` columns.
std::size_t column_sums_scratch(std::int64_t channels);

// -- attention.hpp -------------------------------------------------------------------------------------------------
/// Bytes of scratch of plain_attention_backward over `tokens` = B T.
std::size_t plain_attention_scratch(std::int64_t tokens, std::int64_t heads);
/// Bytes of scratch of a call that cuDNN may take: statistics that nobody asked for, then the library's workspace; or
/// the scratch of the plain kernels.
std::size_t cudnn_attention_scratch(const AttentionShape& shape, DType activations);

// -- matmul.hpp ----------------------------------------------------------------------------------------------------
/// Bytes of workspace of every product by cuBLASLt.
constexpr std::size_t cublaslt_workspace = std::size_t{32} << 20;

// -- all of them ---------------------------------------------------------------------------------------------------
/// The largest call of attention that a model within `needs` makes.
AttentionShape largest_attention(const WorkspaceNeeds& needs);
/// Bytes of scratch of all calls within `needs`: the front is for matrix products, the rest for one kernel at a time.
/// `matmul`, `attention`: bytes that a product and the largest call of attention take.
std::size_t ops_scratch(const WorkspaceNeeds& needs, std::size_t matmul, std::size_t attention);

/// Rules of CudaOps on a card whose products leave GELU to kernels, as GeForce cards' do, with cuBLASLt and cuDNN.
class TypicalRules final : public OpsRules {
 public:
  std::size_t workspace_bytes(const WorkspaceNeeds& needs) const override;
  std::size_t fp8_bytes(std::int64_t rows, std::int64_t columns, Fp8Sums sums) const override;
  std::size_t magnitude_bytes() const override;
};

}  // namespace tandem::gpu
