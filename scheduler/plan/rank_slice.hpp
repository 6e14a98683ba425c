#pragma once
// Slices of a layer that the ranks of a group own. They are as equal as whole quanta allow, but for elements with f32
// weights, which the first rank owns: its slice is the largest, so that a plan for rank 0 has room for any other's.
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/device/group.hpp"
#include "core/params/parameter_layout.hpp"

namespace tandem {

/// Elements [begin, end) of a layer's flat arrays, multiples of layout_quantum.
struct ElementRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t count() const noexcept { return end - begin; }
  bool operator==(const ElementRange&) const = default;
};

/// Ranks own state, gradient and weight of the same trained elements, and weights of frozen ones.
struct LayerSlice {
  ElementRange trained;  ///< part of [0, Layer::state_elements)
  ElementRange frozen;   ///< part of the elements behind it
  std::int64_t count() const noexcept { return trained.count() + frozen.count(); }
  /// Index of an element of the slice, or of the end of one of its ranges, in an array of this slice alone.
  std::int64_t place_of(std::int64_t element) const noexcept {
    const bool after = frozen.count() > 0 && element >= frozen.begin;
    return after ? trained.count() + element - frozen.begin : element - trained.begin;
  }
  /// Calls call(begin, count) for each run of neighbouring elements: one or two, none where the slice is empty.
  template <class Call>
  void for_runs(Call call) const {
    const bool one = trained.end == frozen.begin && trained.count() > 0;
    if (one) return call(trained.begin, count());
    if (trained.count() > 0) call(trained.begin, trained.count());
    if (frozen.count() > 0) call(frozen.begin, frozen.count());
  }
};

LayerSlice slice_of(const Layer& layer, Rank rank) noexcept;

/// Bytes of a slice's weights.
std::size_t weight_bytes(const Layer& layer, const LayerSlice& slice) noexcept;
/// Bytes from the beginning of an array of this slice's weights alone to an element of it.
std::size_t weight_place(const Layer& layer, const LayerSlice& slice, std::int64_t element) noexcept;

/// Bytes of all ranks together, where each has `each`.
constexpr std::size_t of_all_ranks(std::size_t each, Rank rank) noexcept {
  return each * static_cast<std::size_t>(rank.count);
}
/// One rank's part of the bytes that all ranks have together, rounded up.
constexpr std::size_t part_of_rank(std::size_t all, Rank rank) noexcept {
  const auto ranks = static_cast<std::size_t>(rank.count);
  return (all + ranks - 1) / ranks;
}

/// Bytes that each rank owns of a layer's gradient buffer.
std::vector<ByteRange> gradient_parts(const Layer& layer, int ranks);
/// Bytes of each rank's trained and of its frozen elements in the layer's weights.
std::array<std::vector<ByteRange>, 2> weight_parts(const Layer& layer, int ranks);

}  // namespace tandem
