#include "scheduler/plan/link_codes.hpp"

#include "core/tensor/dtype.hpp"
#include "scheduler/plan/plan.hpp"
#include "scheduler/plan/rank_slice.hpp"

namespace tandem {

std::int64_t factor_scales(const Parameter& factor) noexcept {
  return scale_floats(WeightCode::fp8, factor.coded_shape());
}

std::size_t code_bytes_alone(const Layer& layer) noexcept {
  std::size_t bytes = 0;
  for (const Parameter& p : layer.parameters) {
    if (p.options.fp8_factor) bytes += static_cast<std::size_t>(p.padded_count);
  }
  return bytes;
}

std::size_t code_bytes(const Layer& layer) noexcept {
  std::size_t bytes = code_bytes_alone(layer);
  for (const Parameter& p : layer.parameters) {
    if (p.options.fp8_factor) bytes += static_cast<std::size_t>(factor_scales(p)) * sizeof(float);
  }
  return bytes;
}

std::size_t fetched_bytes(const Layer& layer, const LayerPlacement& placed, Rank rank) noexcept {
  const std::size_t stored = weight_bytes(layer, slice_of(layer, rank));
  if (!placed.in_codes) return stored;
  return stored - code_bytes_alone(layer) * size_of(DType::bf16) + code_bytes(layer);
}

}  // namespace tandem
