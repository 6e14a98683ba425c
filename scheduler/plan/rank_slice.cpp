#include "scheduler/plan/rank_slice.hpp"

#include <algorithm>

#include "core/tensor/dtype.hpp"
#include "core/tensor/layout_quantum.hpp"

namespace tandem {
namespace {

ElementRange share_of(std::int64_t begin, std::int64_t end, Rank rank) noexcept {
  const std::int64_t blocks = (end - begin) / layout_quantum;
  const std::int64_t each = blocks / rank.count, left = blocks % rank.count;
  const auto bound = [&](std::int64_t index) {
    return begin + (each * index + std::min(index, left)) * layout_quantum;
  };
  return {bound(rank.index), bound(rank.index + 1)};
}

}  // namespace

/// Elements with f32 weights are few, and the first rank's, so that subgroups of them are no other's.
LayerSlice slice_of(const Layer& layer, Rank rank) noexcept {
  ElementRange trained = share_of(layer.fp32_elements, layer.state_elements, rank);
  if (rank.index == 0) trained.begin = 0;
  return {trained, share_of(layer.state_elements, layer.elements, rank)};
}

std::size_t weight_bytes(const Layer& layer, const LayerSlice& slice) noexcept {
  return layer.weight_offset(slice.trained.end) - layer.weight_offset(slice.trained.begin) +
         layer.weight_offset(slice.frozen.end) - layer.weight_offset(slice.frozen.begin);
}

std::size_t weight_place(const Layer& layer, const LayerSlice& slice, std::int64_t element) noexcept {
  const bool after = slice.frozen.count() > 0 && element >= slice.frozen.begin;
  if (!after) return layer.weight_offset(element) - layer.weight_offset(slice.trained.begin);
  return layer.weight_offset(slice.trained.end) - layer.weight_offset(slice.trained.begin) +
         layer.weight_offset(element) - layer.weight_offset(slice.frozen.begin);
}

std::vector<ByteRange> gradient_parts(const Layer& layer, int ranks) {
  std::vector<ByteRange> parts;
  for (int r = 0; r < ranks; ++r) {
    const ElementRange trained = slice_of(layer, {r, ranks}).trained;
    parts.push_back({layer.gradient_offset(trained.begin), layer.gradient_offset(trained.end)});
  }
  return parts;
}

std::array<std::vector<ByteRange>, 2> weight_parts(const Layer& layer, int ranks) {
  std::array<std::vector<ByteRange>, 2> parts;
  const auto bytes = [&](std::int64_t element) { return layer.weight_offset(element); };
  for (int r = 0; r < ranks; ++r) {
    const LayerSlice slice = slice_of(layer, {r, ranks});
    parts[0].push_back({bytes(slice.trained.begin), bytes(slice.trained.end)});
    parts[1].push_back({bytes(slice.frozen.begin), bytes(slice.frozen.end)});
  }
  return parts;
}

}  // namespace tandem
