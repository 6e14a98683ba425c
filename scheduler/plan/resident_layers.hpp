#pragma once
// Which layers' weights are most worth the device's memory.
#include <vector>

#include "core/params/parameter_layout.hpp"
#include "scheduler/plan/plan.hpp"

namespace tandem {

/// Layers, that whose weights save most bytes across the link for each byte of memory first; of equals the first one.
/// `plan`: its subgroups and order of micro-batches are what counts, its placement of weights is not looked at.
std::vector<int> by_worth_of_residence(const ParameterLayout& layout, const Plan& plan);

}  // namespace tandem
