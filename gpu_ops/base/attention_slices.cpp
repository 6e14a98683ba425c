#include "gpu_ops/base/attention_slices.hpp"

#include <algorithm>
#include <limits>

namespace tandem::gpu {
namespace {

constexpr std::int64_t most_elements = std::numeric_limits<std::int32_t>::max();

std::int64_t whole(std::int64_t value, std::int64_t tile) { return (value + tile - 1) / tile * tile; }

std::int64_t largest_divisor(std::int64_t of, std::int64_t most) {
  std::int64_t divisor = std::min(of, most);
  while (divisor > 1 && of % divisor != 0) --divisor;
  return divisor;
}

/// Statistics of a slice begin at packets of 16 bytes, too.
AttentionSlices in_packets(const AttentionShape& shape, AttentionSlices slices) {
  const bool several = slices.batch < shape.batch || slices.kv_heads < shape.kv_heads;
  return several && shape.sequence % 4 != 0 ? AttentionSlices{} : slices;
}

/// Slices of up to `most_batch` sequences and of up to `units` key/value heads in all, at least one.
AttentionSlices slices_of(const AttentionShape& shape, std::int64_t most_batch, std::int64_t units) {
  if (units < shape.kv_heads) return {1, largest_divisor(shape.kv_heads, units)};
  return {largest_divisor(shape.batch, std::min(most_batch, units / shape.kv_heads)), shape.kv_heads};
}

/// Multiply-adds: two products with the keys that are seen, half of them where there is no window.
double forward_work(const AttentionShape& shape) {
  const auto sequence = static_cast<double>(shape.sequence), reach = static_cast<double>(shape.reach());
  return static_cast<double>(shape.batch * shape.heads * shape.head_dim) * reach * (2 * sequence - reach);
}

/// Sequences whose rows lie within what the library counts; 0 where a single one does not.
std::int64_t countable(const AttentionShape& shape, std::int64_t widest_row) {
  return most_elements / std::max<std::int64_t>(1, shape.sequence * widest_row);
}

}  // namespace

std::size_t backward_workspace(const AttentionShape& shape, std::int64_t batch, std::int64_t kv_heads) {
  constexpr std::int64_t query_tile = 64, key_tile = 128, half = 2, single = 4;
  constexpr std::int64_t rounding = 64 << 10;  // offsets, counters and padding within the workspace
  const std::int64_t group = shape.group(), heads = batch * kv_heads * group;
  std::int64_t bytes = whole(shape.sequence, query_tile) * whole(shape.sequence, key_tile) * half;
  bytes += shape.sequence * single;
  if (group > 1) bytes += 2 * shape.sequence * shape.head_dim * half;
  return static_cast<std::size_t>(heads * bytes + rounding);
}

AttentionSlices forward_slices(const AttentionShape& shape, std::int64_t widest_row) {
  const std::int64_t countable_batch = countable(shape, widest_row);
  if (shape.batch == 0 || countable_batch == 0) return {};
  const AttentionSlices fewest{largest_divisor(shape.batch, countable_batch), shape.kv_heads};
  const double one = forward_work(shape) / static_cast<double>(shape.batch * shape.kv_heads);
  const auto units = static_cast<std::int64_t>(std::max(1.0, preferred_forward_work / std::max(1.0, one)));
  const AttentionSlices shorter = slices_of(shape, countable_batch, units);
  const AttentionSlices aligned = in_packets(shape, shorter);
  return aligned == AttentionSlices{} ? in_packets(shape, fewest) : aligned;
}

AttentionSlices backward_slices(const AttentionShape& shape, std::int64_t widest_row) {
  const std::int64_t countable_batch = countable(shape, widest_row);
  const std::size_t one = backward_workspace(shape, 1, 1);
  if (shape.batch == 0 || countable_batch == 0 || one > most_workspace) return {};
  const auto units = static_cast<std::int64_t>(std::max<std::size_t>(1, preferred_workspace / one));
  return in_packets(shape, slices_of(shape, countable_batch, units));
}

std::size_t backward_scratch(const AttentionShape& shape) {
  const std::size_t one = backward_workspace(shape, 1, 1);
  if (one > most_workspace) return 0;
  // A batch that divides better may have larger slices than a larger batch.
  return std::min(backward_workspace(shape, shape.batch, shape.kv_heads), std::max(preferred_workspace, one));
}

HeadsTensor heads_tensor(const AttentionShape& shape, std::int64_t batch, std::int64_t heads, std::int64_t row_stride) {
  return {{batch, heads, shape.sequence, shape.head_dim}, {shape.sequence * row_stride, shape.head_dim, row_stride, 1}};
}

HeadsTensor statistics_tensor(const AttentionShape& shape, std::int64_t batch, std::int64_t heads) {
  // cuDNN wants a single sequence packed, although the first stride then has no meaning.
  const std::int64_t between = (batch == 1 ? heads : shape.heads) * shape.sequence;
  return {{batch, heads, shape.sequence, 1}, {between, shape.sequence, 1, 1}};
}

}  // namespace tandem::gpu
