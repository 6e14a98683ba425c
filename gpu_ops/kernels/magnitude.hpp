#pragma once
// Magnitudes of MeasuredView on a GPU (base/fp8_matrix.hpp), found by the kernels that write the tensors.
#include <type_traits>

#include "core/numerics/fp8_scale.hpp"
#include "gpu_ops/base/fp8_matrix.hpp"
#include "gpu_ops/kernels/elements.hpp"

namespace tandem::gpu {

// -- on the host ---------------------------------------------------------------------------------------------------

/// Geometry of a launch that writes a tensor, by strides of the grid: with a magnitude at most a block for each part.
inline Geometry measured(Geometry geometry, const MeasuredView& to) {
  if (to.magnitude != nullptr && geometry.grid > most_fp8_parts) geometry.grid = most_fp8_parts;
  return geometry;
}

/// Calls f with the type of a launch that finds magnitudes or none: two kernels, of which the second does nothing for
/// it.
template <class F>
void with_finding(bool finds, const F& f) {
  if (finds) return f(std::true_type{});
  f(std::false_type{});
}

inline Largest* largest_of(const MeasuredView& to) { return static_cast<Largest*>(to.magnitude); }

// -- on the device -------------------------------------------------------------------------------------------------

TANDEM_DEVICE std::uint32_t larger(std::uint32_t a, std::uint32_t b) { return a > b ? a : b; }

/// Largest value of all threads of a block, in each. All threads call it, once for each `room` of most_warps.
TANDEM_DEVICE std::uint32_t block_maximum(std::uint32_t value, std::uint32_t* room) {
  for (int distance = warp_lanes / 2; distance > 0; distance /= 2) value = larger(value, shuffle_xor(value, distance));
  if (own_lane() == 0) room[thread_index() / warp_lanes] = value;
  barrier();
  const int warps = block_size() / warp_lanes;
  TANDEM_UNROLL
  for (int warp = 0; warp < most_warps; ++warp) {
    if (warp < warps) value = larger(value, room[warp]);
  }
  return value;
}

/// Largest magnitude of what a thread has written, where a launch `finds` it and there is memory.
template <bool finds>
class Magnitude {
 public:
  TANDEM_DEVICE explicit Magnitude(Largest* to) : to_(to) {}

  /// Stores a span, rounded where T is bf16, and counts the elements as they then are.
  template <class T>
  TANDEM_DEVICE void store(T* data, const Span& span, const Floats& p) {
    if constexpr (finds) {
      const Raw<T> raw = in_memory(p, T{});
      store_packed(data, span, raw);
      add(span, widened(raw));
    } else {
      gpu::store(data, span, p);
    }
  }
  TANDEM_DEVICE void add(const Span& span, const Floats& p) {
    TANDEM_UNROLL
    for (int i = 0; i < packet; ++i) {
      if (i < span.count) seen_ = larger(seen_, numerics::fp8_magnitude(p.x[i]));
    }
  }
  /// Writes the block's part. All threads of the block call it, last of all; `room`: most_warps.
  TANDEM_DEVICE void write(std::uint32_t* room) const {
    if (!finds || to_ == nullptr) return;
    const std::uint32_t of_block = block_maximum(seen_, room);
    if (thread_index() != 0) return;
    to_->part[block_index()] = of_block;
    if (block_index() == 0) to_->parts = static_cast<std::uint32_t>(grid_size());
  }

 private:
  TANDEM_DEVICE static Raw<bf16> in_memory(const Floats& p, bf16) { return rounded(p); }
  TANDEM_DEVICE static Raw<float> in_memory(const Floats& p, float) { return packed(p); }
  TANDEM_DEVICE static void store_packed(bf16* data, const Span& span, const Raw<bf16>& raw) {
    store_raw(data, span, raw);
  }
  TANDEM_DEVICE static void store_packed(float* data, const Span& span, const Raw<float>& raw) {
    store_exactly(data, span, widened(raw));
  }

  Largest* to_;
  std::uint32_t seen_ = 0;
};

}  // namespace tandem::gpu
