#pragma once
// A set of lanes.
#include <bit>
#include <cstdint>
#include <span>

#include "scheduler/tasks/task.hpp"

namespace tandem {

/// A set of lanes, a bit each: what is common to several takes one instruction.
class LaneSet {
 public:
  constexpr LaneSet() = default;
  constexpr explicit LaneSet(std::span<const Lane> lanes) noexcept {
    for (const Lane lane : lanes) add(lane);
  }
  constexpr explicit LaneSet(Lane lane) noexcept { add(lane); }

  constexpr void add(Lane lane) noexcept { bits_ |= bit(lane); }
  constexpr void remove(Lane lane) noexcept { bits_ &= ~bit(lane); }
  constexpr bool has(Lane lane) const noexcept { return (bits_ & bit(lane)) != 0; }
  constexpr bool empty() const noexcept { return bits_ == 0; }
  /// The first one in the order of `Lane`. There must be one.
  constexpr Lane first() const noexcept { return static_cast<Lane>(std::countr_zero(bits_)); }
  /// Lanes that are not in `other`.
  constexpr LaneSet without(LaneSet other) const noexcept { return LaneSet(bits_ & ~other.bits_); }
  constexpr LaneSet operator&(LaneSet other) const noexcept { return LaneSet(bits_ & other.bits_); }
  constexpr LaneSet operator|(LaneSet other) const noexcept { return LaneSet(bits_ | other.bits_); }

 private:
  static_assert(lane_count <= 32);
  constexpr explicit LaneSet(std::uint32_t bits) noexcept : bits_(bits) {}
  static constexpr std::uint32_t bit(Lane lane) noexcept { return std::uint32_t{1} << static_cast<unsigned>(lane); }

  std::uint32_t bits_ = 0;
};

}  // namespace tandem
