#pragma once
// Whether a step's updates run before its gradient norm is known.
#include <bit>
#include <cstdint>

#include "scheduler/plan/options.hpp"

namespace tandem {

/// Decides by the norms of past steps alone, which are the same on every rank. An update that is taken back costs a
/// second one; so, where the choice is left to it, three quarters of the last steps must have been confirmed.
class SpeculationChoice {
 public:
  explicit SpeculationChoice(Speculate speculate) noexcept : speculate_(speculate) {}

  bool speculates() const noexcept {
    if (speculate_ != Speculate::automatic) return speculate_ == Speculate::on;
    return std::popcount(confirmed_) >= least_confirmed;
  }
  /// A step has ended: with the updates that were expected when it began, or others, or none.
  void note(bool as_expected) noexcept {
    confirmed_ = static_cast<std::uint8_t>(confirmed_ << 1 | (as_expected ? 1 : 0));
  }

 private:
  static constexpr int least_confirmed = 6;

  Speculate speculate_;
  std::uint8_t confirmed_ = 0;  ///< a bit for each of the last eight steps
};

}  // namespace tandem
