#pragma once
// How a call of attention is cut into calls of cuDNN's and described to it: plain functions, tested without a GPU.
//
// cuDNN's deterministic backward keeps the gradients of the scores, (T, T) for each head, in its workspace. So a call
// goes to it slice by slice: some sequences, or some heads of one, so many that the workspace stays small. Heads do
// not see each other, and a slice is the operands' own memory, seen from further on.
#include <array>
#include <cstddef>
#include <cstdint>

#include "core/ops/ops.hpp"

namespace tandem::gpu {

/// Size of a slice: `batch` sequences with all their heads, or one sequence with the query heads of `kv_heads`
/// key/value heads. Every slice of a call is alike. `batch` 0: the library is not to be asked.
struct AttentionSlices {
  std::int64_t batch = 0;
  std::int64_t kv_heads = 0;
  bool operator==(const AttentionSlices&) const = default;
};

/// A slice of several sequences or heads has no more: gradients of 2^27 scores, which are 8 heads at 4,096 tokens and
/// enough blocks for every multiprocessor, and an eighth more for what lies beside them (sums, dk and dv of heads that
/// share keys), without which a call would be cut in two wherever lengths and heads are powers of two.
constexpr std::size_t preferred_workspace = std::size_t{288} << 20;
/// Largest workspace, in bytes, of a single group of heads.
constexpr std::size_t most_workspace = std::size_t{1} << 30;

/// Largest workspace that backward of `batch` sequences with `kv_heads` of the key/value heads is granted: gradients of
/// scores in whole tiles, a sum for each row, and where heads share keys dk and dv of each query head.
std::size_t backward_workspace(const AttentionShape& shape, std::int64_t batch, std::int64_t kv_heads);
/// Workspace, in bytes, that forward is granted: it needs next to nothing.
constexpr std::size_t forward_workspace = std::size_t{1} << 20;
/// Multiply-adds of a slice of several sequences or heads in forward, at most: a quarter of a second of a small card. A
/// screen on the same card, and Windows above it, wait for no longer; and it is far more than fills a card. (32 heads
/// of 128 at 16,384 tokens.)
constexpr double preferred_forward_work = 0x1p40;

/// Functions of the shape and of the widest row stride (elements) among the operands, as one slice spans less than
/// 2^31 elements of any: the library's kernels count in 32 bits. Where shorter slices of forward would not begin at
/// packets of 16 bytes, they are as long as they are.
AttentionSlices forward_slices(const AttentionShape& shape, std::int64_t widest_row);
AttentionSlices backward_slices(const AttentionShape& shape, std::int64_t widest_row);

/// Largest scratch, in bytes, of backward of up to `shape.batch` such sequences, however it is cut.
std::size_t backward_scratch(const AttentionShape& shape);

/// A tensor as cuDNN is told of it: (B, H, T, D), or (B, H, T, 1) of the statistics, in elements.
struct HeadsTensor {
  std::array<std::int64_t, 4> dims{};
  std::array<std::int64_t, 4> strides{};
  bool operator==(const HeadsTensor&) const = default;
};
/// `heads` heads of an operand whose tokens are `row_stride` elements apart.
HeadsTensor heads_tensor(const AttentionShape& shape, std::int64_t batch, std::int64_t heads, std::int64_t row_stride);
/// Statistics of attention, (B, H, T) f32, as a tensor of cuDNN's.
HeadsTensor statistics_tensor(const AttentionShape& shape, std::int64_t batch, std::int64_t heads);

/// Elements from the first of an operand to its part in a slice that begins with sequence `b` and head `h`.
constexpr std::int64_t heads_offset(const AttentionShape& shape, std::int64_t row_stride, std::int64_t b,
                                    std::int64_t h) {
  return b * shape.sequence * row_stride + h * shape.head_dim;
}
constexpr std::int64_t statistics_offset(const AttentionShape& shape, std::int64_t b, std::int64_t h) {
  return (b * shape.heads + h) * shape.sequence;
}

}  // namespace tandem::gpu
