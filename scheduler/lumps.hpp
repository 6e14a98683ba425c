#pragma once
// Steps with less in them than the plan has, which stand for the whole.
#include <cstdint>

#include "core/parameter_layout.hpp"
#include "scheduler/plan.hpp"
#include "scheduler/walk.hpp"

namespace tandem {

/// Where all micro-batches pass at once, and there are more than four: all but the first and the last two as one. Each
/// leaves its gradients in the same sum on the device, so that nothing but its own work tells one from another.
Accumulation in_lumps(const Accumulation& whole) noexcept;

/// The plan with neighbours that go the same way as one subgroup, and each subgroup as one piece: about so many pieces.
Plan in_lumps(const ParameterLayout& layout, Plan plan, std::int64_t lumps);

}  // namespace tandem
