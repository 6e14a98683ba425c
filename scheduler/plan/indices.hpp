#pragma once
// Indices of layers and of subgroups, and what they find. `ParameterLayout` and `Plan` are public: they count with int
// and hold plain vectors. Whoever works with them converts here.
#include "core/base/index.hpp"
#include "core/params/parameter_layout.hpp"
#include "scheduler/plan/plan.hpp"

namespace tandem {

/// Index in ParameterLayout::layers, and in Plan::layers.
using LayerIndex = Index<Layer>;
/// Index in Plan::subgroups.
using SubgroupIndex = Index<Subgroup>;

inline IndexRange<LayerIndex> layers_of(const ParameterLayout& layout) noexcept {
  return indices<LayerIndex>(layout.layers().size());
}
inline IndexRange<SubgroupIndex> subgroups_of(const Plan& plan) noexcept {
  return indices<SubgroupIndex>(plan.subgroups.size());
}
/// Whether the layout has such a layer: where a caller's number is checked.
inline bool has_layer(const ParameterLayout& layout, LayerIndex layer) noexcept {
  return !layer.none() && layer.position() < layout.layers().size();
}

inline LayerIndex layer_of(const Subgroup& subgroup) noexcept { return LayerIndex(subgroup.layer); }
inline LayerIndex layer_of(const Parameter& parameter) noexcept { return LayerIndex(parameter.layer); }

/// Throws std::out_of_range where there is none.
inline const Layer& layer_at(const ParameterLayout& layout, LayerIndex layer) { return layout.layer(layer.number()); }
/// Items of a plan. The index must be valid: it is not checked.
inline const LayerPlacement& placement_at(const Plan& plan, LayerIndex layer) { return plan.layers[layer.position()]; }
inline LayerPlacement& placement_at(Plan& plan, LayerIndex layer) { return plan.layers[layer.position()]; }
inline const Subgroup& subgroup_at(const Plan& plan, SubgroupIndex subgroup) {
  return plan.subgroups[subgroup.position()];
}

}  // namespace tandem
