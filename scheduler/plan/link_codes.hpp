#pragma once
// Codes in which the fp8_factors of a layer cross the link: e4m3 under one power of two for a matrix, as a frozen
// matrix of WeightCode::fp8 has them, with that power as the scale of every block. They lie one matrix after another,
// then the scales of all.
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/device/group.hpp"
#include "core/params/parameter_layout.hpp"

namespace tandem {

struct LayerPlacement;

/// Floats that are the scales of an fp8_factor.
std::int64_t factor_scales(const Parameter& factor) noexcept;
/// Bytes of the codes of a layer's fp8_factors, without and with their scales; 0: it has none.
std::size_t code_bytes_alone(const Layer& layer) noexcept;
std::size_t code_bytes(const Layer& layer) noexcept;
/// Bytes across the link of a fetch of the layer by a rank.
std::size_t fetched_bytes(const Layer& layer, const LayerPlacement& placed, Rank rank) noexcept;

/// Calls call(parameter, codes, scales) for each fp8_factor of a layer, with the places of its codes and scales in
/// bytes from the beginning of the layer's codes.
template <class Call>
void for_factors(const Layer& layer, Call call) {
  std::size_t codes = 0, scales = code_bytes_alone(layer);
  for (const Parameter& p : layer.parameters) {
    if (!p.options.fp8_factor) continue;
    call(p, codes, scales);
    codes += static_cast<std::size_t>(p.padded_count);
    scales += static_cast<std::size_t>(factor_scales(p)) * sizeof(float);
  }
}

/// Calls call(begin, count) for each run of a layer's elements that are of no fp8_factor.
template <class Call>
void for_uncoded(const Layer& layer, Call call) {
  for (std::int64_t begin = 0; begin < layer.elements;) {
    const Parameter* next = nullptr;
    for (const Parameter& p : layer.parameters) {
      if (p.options.fp8_factor && p.offset >= begin && (next == nullptr || p.offset < next->offset)) next = &p;
    }
    const std::int64_t end = next == nullptr ? layer.elements : next->offset;
    if (end > begin) call(begin, end - begin);
    begin = next == nullptr ? end : end + next->padded_count;
  }
}

}  // namespace tandem
