#pragma once
// The arrays that make up the optimizer state of a parameter.
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace tandem {

enum class StateArray : std::uint8_t { master, m, v };

/// The arrays in the order of checkpoints and of the digest.
constexpr std::array state_arrays = {StateArray::master, StateArray::m, StateArray::v};

/// Arrays that a parameter has; a frozen one has its master alone, the widened weight.
constexpr std::span<const StateArray> arrays_of(bool trainable) noexcept {
  return std::span(state_arrays).first(trainable ? state_arrays.size() : 1);
}

}  // namespace tandem
