#pragma once
// Share of a plan that lives in a file.
#include <cstdint>

#include "scheduler/plan/plan.hpp"

namespace tandem::testing {

/// Parameters whose state lives there.
inline std::int64_t parameters_in_file(const Plan& plan) {
  std::int64_t count = 0;
  for (const Subgroup& s : plan.subgroups) count += s.tier == Tier::file ? s.count() : 0;
  return count;
}

}  // namespace tandem::testing
