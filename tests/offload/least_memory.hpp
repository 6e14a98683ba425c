#pragma once
// The smallest device on which a plan has room.
#include <cstddef>

#include "core/device/device.hpp"
#include "scheduler/plan/plan.hpp"

namespace tandem::testing {

/// `facts` with the least of their `device_capacity`, to within `arena_alignment`, for which there is a plan.
inline PlanningFacts on_least_memory(const ParameterLayout& layout, const OffloadOptions& options,
                                     PlanningFacts facts) {
  for (std::size_t step = facts.device_capacity / 2; step >= arena_alignment; step /= 2) {
    facts.device_capacity -= step;
    if (!find_plan(layout, options, facts)) facts.device_capacity += step;
  }
  return facts;
}

}  // namespace tandem::testing
