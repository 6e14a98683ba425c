#pragma once
// The arrays that make up the optimizer state of a parameter.
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "core/numerics/optimizer.hpp"

namespace tandem {

enum class StateArray : std::uint8_t { master, m, v };

/// The arrays in the order of checkpoints and of the digest.
constexpr std::array state_arrays = {StateArray::master, StateArray::m, StateArray::v};

/// Arrays that a parameter has; a frozen one has its master alone, the widened weight. What it has not reads as zero.
constexpr std::span<const StateArray> arrays_of(bool trainable, Optimizer optimizer) noexcept {
  const std::size_t trained = optimizer == Optimizer::lion ? 2 : 3;
  return std::span(state_arrays).first(trainable ? trained : 1);
}

}  // namespace tandem
