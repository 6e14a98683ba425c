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

LayerSlice slice_of(const Layer& layer, Rank rank) noexcept {
  return {share_of(0, layer.state_elements, rank), share_of(layer.state_elements, layer.elements, rank)};
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
  const auto bytes = [](std::int64_t elements) { return static_cast<std::size_t>(elements) * size_of(DType::bf16); };
  for (int r = 0; r < ranks; ++r) {
    const LayerSlice slice = slice_of(layer, {r, ranks});
    parts[0].push_back({bytes(slice.trained.begin), bytes(slice.trained.end)});
    parts[1].push_back({bytes(slice.frozen.begin), bytes(slice.frozen.end)});
  }
  return parts;
}

}  // namespace tandem
