#pragma once
// Order in which layers' weights are worth the device's memory.
#include <vector>

#include "core/params/parameter_layout.hpp"
#include "scheduler/plan/indices.hpp"
#include "scheduler/plan/plan.hpp"

namespace tandem {

/// Layers in order of worth: first the one whose weights save most bytes across the link for each byte of memory, of
/// equal ones the first. `plan`: its subgroups and its order of micro-batches count, its placement of weights does not.
std::vector<LayerIndex> by_worth_of_residence(const ParameterLayout& layout, const Plan& plan);

}  // namespace tandem
