#pragma once
// Shared parts of the products of experts: operands, and which tile of rows a block computes. How many rows an expert
// has is known on the device alone, so that as many blocks are started as there can be tiles, and each finds its own.
#include <kernel_language.hpp>

#include "core/ops/ops.hpp"
#include "gpu_ops/base/geometry.hpp"

struct CUstream_st;

namespace tandem::gpu {

/// Values of rows where they lie, or at their tokens.
template <class T>
struct RowSource {
  const T* data;
  std::int64_t stride;
  const std::int32_t* slots;  ///< slot of each row; null: a row has values of its own
  Divisor choices;            ///< slots of a token

  TANDEM_DEVICE const T* row(std::int64_t i) const { return at_place(place(look_up(i))); }
  /// The steps of row(i), for kernels that prefetch: look_up() may wait for memory, and gives a number below 2^31;
  /// place() makes it the row of `data`, and at_place() that row's address.
  TANDEM_DEVICE std::uint32_t look_up(std::int64_t i) const {
    return static_cast<std::uint32_t>(slots == nullptr ? i : slots[i]);
  }
  TANDEM_DEVICE std::uint32_t place(std::uint32_t found) const {
    return slots == nullptr ? found : choices.quotient(found);
  }
  TANDEM_DEVICE const T* at_place(std::uint32_t place) const { return data + place * stride; }
};

/// y (rows, n) = or += (where `accumulate`) x (rows, k) times the weight of each row's expert, which is (n, k), or (k,
/// n) where `across`.
template <class T>
struct RowProduct {
  RowSource<T> x;
  const bf16* w;
  T* y;
  const std::int32_t* begins;
  std::int64_t experts, rows, k, n;
  bool across, accumulate;
};

/// dw (experts, m, n) = dy^T x over the rows of each expert, dy (rows, m) and x (rows, n); or += where W is float.
template <class T, class W>
struct WeightProduct {
  RowSource<T> dy, x;
  W* dw;
  const std::int32_t* begins;
  std::int64_t experts, m, n;
};

/// Rows [first, end) of an expert; a negative one: there is no such tile.
struct ExpertTile {
  std::int64_t expert, first, end;
};

/// The `index`-th of the tiles of up to `size` rows that those of each expert are cut into. All lanes of a warp call
/// it, each warp for itself.
TANDEM_DEVICE ExpertTile find_tile(const std::int32_t* begins, std::int64_t experts, std::int64_t index, int size) {
  const int lane = thread_index() % warp_lanes;
  std::int64_t left = index;
  for (std::int64_t base = 0; base < experts; base += warp_lanes) {
    const std::int64_t own = base + lane;
    const std::int32_t begin = own < experts ? begins[own] : 0, end = own < experts ? begins[own + 1] : 0;
    const std::int32_t tiles = (end - begin + size - 1) / size;
    std::int32_t upto = tiles,
                 all = tiles;  // sums over the lanes up to this one, and over all lanes, that have been added up
    for (int distance = 1; distance < warp_lanes; distance *= 2) {
      const std::int32_t others = shuffle_xor(all, distance);
      upto += (lane & distance) != 0 ? others : 0;
      all += others;
    }
    if (left < all) {
      const int found = lowest_bit(ballot(left < upto));
      const std::int64_t first = value_of_lane(begin, found) + (left - value_of_lane(upto - tiles, found)) * size;
      const std::int64_t last = value_of_lane(end, found);
      return {base + found, first, first + size < last ? first + size : last};
    }
    left -= all;
  }
  return {-1, 0, 0};
}

/// Products on tensor cores (expert_products_tensor.cu).
void tensor_expert_product(const RowProduct<bf16>& product, CUstream_st* stream);
void tensor_expert_weight_product(const WeightProduct<bf16, float>& product, CUstream_st* stream);
void tensor_expert_weight_product(const WeightProduct<bf16, bf16>& product, CUstream_st* stream);

}  // namespace tandem::gpu
