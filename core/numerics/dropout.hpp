#pragma once
// Dropout: which elements are set to zero, as a function of their numbers alone, and what becomes of the others.
#include <cstdint>

#include "core/numerics/ieee.hpp"
#include "core/numerics/random.hpp"

namespace tandem::numerics {

/// Elements that a block of random bits decides: element n by word n % 4 of block n / 4.
constexpr std::uint64_t dropout_block = 4;

/// Rule for a rate: an element whose random word is below `least_kept` is dropped, the others are multiplied.
struct DropoutRule {
  std::uint32_t least_kept = 0;
  float factor = 1.0F;
};

/// `rate`: at least 0, below 1; as a share of 2^32 it is rounded to a whole number of words.
inline DropoutRule dropout_rule(float rate) {
  const double words = 4294967296.0 * static_cast<double>(rate) + 0.5;
  constexpr std::uint32_t most = 0xffffffffu;
  return {words < 4294967295.0 ? static_cast<std::uint32_t>(words) : most,
          static_cast<float>(1.0 / (1.0 - static_cast<double>(rate)))};
}

/// Words of block `index`.
TANDEM_HD Philox128 dropout_bits(std::uint64_t seed, std::uint64_t stream, std::uint64_t index) {
  return philox_block<philox_fewest_rounds>(seed, stream, index);
}

TANDEM_HD float dropped(float x, std::uint32_t word, const DropoutRule& rule) {
  return word < rule.least_kept ? 0.0F : mul(x, rule.factor);
}

}  // namespace tandem::numerics
