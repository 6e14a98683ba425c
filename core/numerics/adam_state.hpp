#pragma once
// How master and moments are stored, and AdamW on an element of stored state. Scalar kernel, SIMD tails and
// CUDA kernel call the same text.
#include <cstddef>
#include <cstdint>

#include "core/numerics/adam.hpp"
#include "core/numerics/bf16.hpp"
#include "core/numerics/random.hpp"

namespace tandem {

/// `fp32`: three fp32 arrays. `split`: the master is the bf16 weight and a 16-bit residual (`join_master`),
/// lossless. `bf16_moments`: `split`, and moments in bf16, rounded stochastically.
enum class StateFormat : std::uint8_t { fp32, split, bf16_moments };

/// Bytes of an element of each array.
constexpr std::size_t master_bytes(StateFormat f) noexcept { return f == StateFormat::fp32 ? 4 : 2; }
constexpr std::size_t moment_bytes(StateFormat f) noexcept { return f == StateFormat::bf16_moments ? 2 : 4; }
constexpr std::size_t state_bytes(StateFormat f) noexcept { return master_bytes(f) + 2 * moment_bytes(f); }

/// Bytes of memory that an update moves for an element: state read and written, the gradient read, the weight written,
/// and read too where it is half of the master. 28, 26, 18.
constexpr std::size_t update_bytes(StateFormat f) noexcept {
  return 2 * state_bytes(f) + 2 + (f == StateFormat::fp32 ? 2 : 4);
}

/// Three arrays of a contiguous range of state, of the types that the format says. Not owned.
struct StateArrays {
  void* master = nullptr;  ///< fp32: float; else std::uint16_t, the residual beside the weight
  void* m = nullptr;       ///< float; bf16_moments: bf16
  void* v = nullptr;

  /// The arrays from element `n` on.
  StateArrays from(std::int64_t n, StateFormat f) const noexcept {
    const auto at = [n](void* array, std::size_t bytes) {
      return static_cast<void*>(static_cast<std::byte*>(array) + static_cast<std::size_t>(n) * bytes);
    };
    return {at(master, master_bytes(f)), at(m, moment_bytes(f)), at(v, moment_bytes(f))};
  }
};

/// One contiguous piece of one parameter's state, (count) each. Arrays do not overlap.
struct AdamPiece {
  StateArrays state;               ///< read and written
  const bf16* gradient = nullptr;  ///< read
  bf16* weight = nullptr;          ///< written: master rounded ties away from zero; read too unless fp32
  std::int64_t count = 0;
  StateFormat format = StateFormat::fp32;
  std::uint64_t index = 0;  ///< of the first element among all state: what stochastic rounding is keyed by

  AdamPiece from(std::int64_t n) const noexcept {
    return {state.from(n, format), gradient + n, weight + n, count - n, format, index + static_cast<std::uint64_t>(n)};
  }
};

namespace numerics {

/// Round to bf16 up or down, up with the probability of the part cut off: `bits` are 16 random ones. Unbiased,
/// so that a moment keeps moving where each step's change is below half a unit. Infinity and NaN as
/// `round_to_bf16`.
TANDEM_HD bf16 round_stochastically(float x, std::uint32_t bits) {
  const std::uint32_t all = float_bits(x);
  if ((all & 0x7f800000u) == 0x7f800000u) return round_to_bf16(x);
  return bf16{static_cast<std::uint16_t>((all + bits) >> 16)};
}

/// Elements that a block of random bits serves.
constexpr std::uint64_t elements_per_block = 4;

/// The block of random bits `index` of a step. Of few rounds: rounding needs bits without bias or pattern, and draws so
/// many of them that they, not memory, would set the pace of the update.
TANDEM_HD Philox128 moment_block(std::uint64_t seed, std::uint64_t step, std::uint64_t index) {
  return philox_block<philox_fewest_rounds>(seed, step, index);
}

/// 32 random bits of one element in one step: the upper half for v, the lower for m.
TANDEM_HD std::uint32_t moment_bits(std::uint64_t seed, std::uint64_t step, std::uint64_t index) {
  return moment_block(seed, step, index / elements_per_block).word[index % elements_per_block];
}

/// AdamW on element `i` of a piece.
template <StateFormat format>
TANDEM_HD void adamw_element(const AdamPiece& p, std::int64_t i, const AdamCoefficients& c) {
  AdamElement s{};
  if constexpr (format == StateFormat::fp32) {
    s.master = static_cast<const float*>(p.state.master)[i];
  } else {
    s.master = join_master(p.weight[i], static_cast<const std::uint16_t*>(p.state.master)[i]);
  }
  if constexpr (format == StateFormat::bf16_moments) {
    s.m = bf16_to_float(static_cast<const bf16*>(p.state.m)[i]);
    s.v = bf16_to_float(static_cast<const bf16*>(p.state.v)[i]);
  } else {
    s.m = static_cast<const float*>(p.state.m)[i];
    s.v = static_cast<const float*>(p.state.v)[i];
  }
  s = adamw(s, bf16_to_float(p.gradient[i]), c);
  p.weight[i] = weight_of_master(s.master);
  if constexpr (format == StateFormat::fp32) {
    static_cast<float*>(p.state.master)[i] = s.master;
  } else {
    static_cast<std::uint16_t*>(p.state.master)[i] = master_residual(s.master);
  }
  if constexpr (format == StateFormat::bf16_moments) {
    const std::uint32_t random = moment_bits(c.seed, c.step, p.index + static_cast<std::uint64_t>(i));
    static_cast<bf16*>(p.state.m)[i] = round_stochastically(s.m, random & 0xffffu);
    static_cast<bf16*>(p.state.v)[i] = round_stochastically(s.v, random >> 16);
  } else {
    static_cast<float*>(p.state.m)[i] = s.m;
    static_cast<float*>(p.state.v)[i] = s.v;
  }
}

}  // namespace numerics
}  // namespace tandem
