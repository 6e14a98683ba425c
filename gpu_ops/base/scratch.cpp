#include "gpu_ops/base/scratch.hpp"

#include <algorithm>

#include "core/memory/memory.hpp"
#include "gpu_ops/base/attention_slices.hpp"
#include "gpu_ops/base/fp8_matrix.hpp"
#include "gpu_ops/base/geometry.hpp"

namespace tandem::gpu {
namespace {

/// Logits at once, 128 MiB of fp32. What reads them reads the weight as well, 2 bytes an element for 2 FLOPs a row: of
/// a vocabulary of 128,000, 261 rows are 261 FLOPs a byte, more than a card has.
constexpr std::int64_t most_logits = std::int64_t{32} << 20;
/// Rows of which the gradient of the weight is made at once: each time it is read and written, 8 bytes an element,
/// which 1,024 rows bring to 256 FLOPs a byte (an H100 has some 210, a card for games 110).
constexpr std::int64_t enough_rows = 1024;
/// Limit of these rows: 256 MiB of the logits' gradient in bf16, which are 1,024 rows of a vocabulary of 131,072.
constexpr std::int64_t most_gradients = std::int64_t{128} << 20;

std::int64_t most_rows(std::int64_t vocabulary) {
  return std::max<std::int64_t>(1, most_logits / std::max<std::int64_t>(1, vocabulary));
}

/// Gradients in fp32 take the place of their logits.
std::int64_t most_gradient_rows(std::int64_t vocabulary, DType activations) {
  const std::int64_t rows = most_rows(vocabulary);
  if (activations == DType::f32) return rows;
  return std::max(rows, std::min(enough_rows, most_gradients / std::max<std::int64_t>(1, vocabulary)));
}

/// Size of even parts of `rows`, at most `most` each.
std::int64_t even_part(std::int64_t rows, std::int64_t most) {
  return std::max<std::int64_t>(1, cut(rows, ceil_div(std::max<std::int64_t>(1, rows), most), 1).size);
}

std::size_t floats(std::int64_t count) { return align_up(static_cast<std::size_t>(count) * sizeof(float)); }

}  // namespace

HeadRows head_loss_rows(const HeadShape& shape) {
  const std::int64_t all = std::max<std::int64_t>(1, shape.tokens);
  const std::int64_t gradients =
      shape.whole() ? all : even_part(shape.tokens, most_gradient_rows(shape.vocabulary, shape.activations));
  const bool in_place = shape.activations == DType::f32;
  return {.logits = in_place ? gradients : even_part(gradients, most_rows(shape.vocabulary)),
          .gradients = gradients,
          .slice_logits = in_place ? all : even_part(shape.tokens, most_rows(shape.written))};
}

HeadRows most_head_loss_rows(const HeadShape& shape) {
  const std::int64_t all = std::max<std::int64_t>(1, shape.tokens);
  const std::int64_t gradients =
      shape.whole() ? all : std::min(all, most_gradient_rows(shape.vocabulary, shape.activations));
  const bool in_place = shape.activations == DType::f32;
  return {.logits = in_place ? gradients : std::min(all, most_rows(shape.vocabulary)),
          .gradients = gradients,
          .slice_logits = in_place ? all : std::min(all, most_rows(shape.written))};
}

std::int64_t logit_stride(std::int64_t vocabulary) { return ceil_div(vocabulary, packet) * packet; }

std::size_t logit_bytes(std::int64_t rows, std::int64_t vocabulary, DType dtype) {
  return align_up(static_cast<std::size_t>(rows * logit_stride(vocabulary)) * size_of(dtype));
}

std::size_t row_scales_bytes(const HeadShape& shape) { return shape.in_slices() ? floats(2 * shape.tokens) : 0; }

std::size_t head_loss_scratch(const HeadRows& at_once, const HeadShape& shape) {
  const bool apart = shape.activations != DType::f32;
  const auto area = [&](std::int64_t logits, std::int64_t gradients, std::int64_t columns) {
    return logit_bytes(logits, columns, DType::f32) + (apart ? logit_bytes(gradients, columns, shape.activations) : 0);
  };
  const std::size_t rows = area(at_once.logits, shape.gradients ? at_once.gradients : 0, shape.vocabulary) +
                           (shape.token_rows ? token_columns_bytes(at_once.gradients, shape.activations) : 0);
  if (!shape.in_slices()) return rows;
  return row_scales_bytes(shape) + std::max(rows, area(at_once.slice_logits, shape.tokens, shape.written));
}

std::int64_t token_columns_stride(std::int64_t tokens) { return logit_stride(tokens); }

std::size_t token_columns_bytes(std::int64_t tokens, DType activations) {
  return logit_bytes(tokens, tokens, activations);
}

std::size_t norm_backward_scratch(std::int64_t channels) {
  const std::size_t sums = floats(most_norm_parts * std::min(channels, longest_held_norm));
  return std::max(2 * sums, column_sums_scratch(channels));
}

std::size_t column_sums_scratch(std::int64_t channels) { return 2 * floats(most_column_parts * channels); }

std::size_t plain_attention_scratch(std::int64_t tokens, std::int64_t heads) { return floats(tokens * heads); }

std::size_t cudnn_attention_scratch(const AttentionShape& shape, DType activations) {
  const std::size_t plain = plain_attention_scratch(shape.batch * shape.sequence, shape.heads);
  if (activations != DType::bf16) return plain;
  return std::max(plain + forward_workspace, backward_scratch(shape));
}

AttentionShape largest_attention(const WorkspaceNeeds& needs) {
  const std::int64_t sequence = std::max<std::int64_t>(1, needs.sequence);
  return {.batch = needs.tokens / sequence,
          .sequence = sequence,
          .heads = needs.heads,
          .kv_heads = needs.kv_heads > 0 ? needs.kv_heads : needs.heads,
          .head_dim = needs.head_dim};
}

std::size_t ops_scratch(const WorkspaceNeeds& needs, std::size_t matmul, std::size_t attention) {
  const HeadShape shape{.tokens = needs.tokens,
                        .vocabulary = needs.vocabulary,
                        .activations = needs.activations,
                        .written = needs.gradients ? needs.head_rows : 0,
                        .gradients = needs.gradients,
                        .token_rows = needs.gradients && needs.head_rows > 0 && needs.token_rows};
  const std::size_t head = head_loss_scratch(most_head_loss_rows(shape), shape);
  return align_up(matmul) + std::max({norm_backward_scratch(needs.channels), head, attention});
}

std::size_t TypicalRules::fp8_bytes(std::int64_t rows, std::int64_t columns, Fp8Sums sums) const {
  return gpu::fp8_bytes(rows, columns, sums);
}
std::size_t TypicalRules::magnitude_bytes() const { return sizeof(Largest); }

std::size_t TypicalRules::workspace_bytes(const WorkspaceNeeds& needs) const {
  const std::size_t attention =  // needs without heads have no attention
      needs.heads == 0 ? 0 : cudnn_attention_scratch(largest_attention(needs), needs.activations);
  return ops_scratch(needs, cublaslt_workspace, attention);
}

}  // namespace tandem::gpu
