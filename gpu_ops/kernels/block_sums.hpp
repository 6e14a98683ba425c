#pragma once
// Sums over the threads of a block, in an order that depends on the size of the block alone.
#include <kernel_language.hpp>

#include "core/numerics/functions.hpp"
#include "gpu_ops/base/geometry.hpp"
#include "gpu_ops/kernels/elements.hpp"

namespace tandem::gpu {

TANDEM_DEVICE float warp_sum(float value) {
  for (int distance = warp_lanes / 2; distance > 0; distance /= 2) value = value + shuffle_xor(value, distance);
  return value;
}

/// Sums of one value of each thread of the block, which has two warps or more, one sum after another.
class BlockSums {
 public:
  /// Shared floats of `room`. Sums take turns at two halves, so that one barrier each is enough: who writes to a half
  /// has passed the barrier of the sum between, and so has everyone who read what was there.
  static constexpr int room_size = 2 * most_warps;

  TANDEM_DEVICE explicit BlockSums(float* room) : room_(room) {
    // For warps that the block does not have.
    const int warps = block_size() / warp_lanes, place = thread_index();
    if (place < room_size && place % most_warps >= warps) room[place] = 0.0F;
  }

  /// Sum over the threads of a block, returned in each: lanes pairwise at distances 16 ... 1, then warps in order. All
  /// threads of the block call it.
  TANDEM_DEVICE float operator()(float value) {
    float* const half = room_ + turn_ * most_warps;
    turn_ = 1 - turn_;
    value = warp_sum(value);
    if (own_lane() == 0) half[thread_index() / warp_lanes] = value;
    barrier();
    float sum = 0.0F;
    for (int warp = 0; warp < most_warps; ++warp) sum = sum + half[warp];
    return sum;
  }

 private:
  float* room_;
  int turn_ = 0;
};

/// Largest value seen, and the sum of exp(value - largest).
struct SoftmaxSum {
  float largest;
  float sum;
};

/// Two parts of a softmax sum in one. Where neither has seen a value above -inf, the sum is NaN or 0 as it was.
TANDEM_DEVICE SoftmaxSum merged(const SoftmaxSum& a, const SoftmaxSum& b) {
  const float largest = a.largest > b.largest ? a.largest : b.largest;
  if (b.sum == 0.0F) return {largest, a.sum};
  if (a.sum == 0.0F) return {largest, b.sum};
  return {largest,
          numerics::fma(a.sum, numerics::exp(a.largest - largest), b.sum * numerics::exp(b.largest - largest))};
}

/// Softmax sum over the threads of a block, returned in each: lanes pairwise at distances 16 ... 1, then warps in
/// order. `room`: 2 * `most_warps` shared floats, free again when the call returns. All threads of the block call it.
TANDEM_DEVICE SoftmaxSum block_softmax_sum(SoftmaxSum part, float* room) {
  const int lane = thread_index() % warp_lanes, own_warp = thread_index() / warp_lanes;
  for (int distance = warp_lanes / 2; distance > 0; distance /= 2) {
    const SoftmaxSum other{shuffle_down(part.largest, distance), shuffle_down(part.sum, distance)};
    part = lane < distance ? merged(part, other) : part;
  }
  if (lane == 0) {
    room[2 * own_warp] = part.largest;
    room[2 * own_warp + 1] = part.sum;
  }
  barrier();
  SoftmaxSum all{room[0], room[1]};
  for (int warp = 1; warp < block_size() / warp_lanes; ++warp) all = merged(all, {room[2 * warp], room[2 * warp + 1]});
  barrier();
  return all;
}

/// Columns of a block whose warps take turns at rows: a packet for each lane.
constexpr int block_columns = warp_lanes * packet;
/// Shared floats of write_part().
constexpr int columns_room = most_warps * block_columns;

/// Adds what the warps of a whole block summed for each of its columns, the first of which is `column`, in their order,
/// and writes the part's sum (channels). All threads of the block call it; `room` is free again when it returns.
TANDEM_DEVICE void write_part(const Floats& sums, float* room, std::int64_t column, std::int64_t channels,
                              float* part) {
  static_assert(block_columns == most_threads);
  const int lane = thread_index() % warp_lanes, warp = thread_index() / warp_lanes;
  for (int i = 0; i < packet; ++i) room[warp * block_columns + lane * packet + i] = sums.x[i];
  barrier();
  float sum = 0.0F;
  for (int w = 0; w < most_warps; ++w) sum = sum + room[w * block_columns + thread_index()];
  if (column + thread_index() < channels) part[column + thread_index()] = sum;
  barrier();
}

}  // namespace tandem::gpu
