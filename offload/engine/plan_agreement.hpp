#pragma once
// Check whether an engine takes a plan; with several ranks, the same answer on all of them.
#include <functional>

#include "core/device/group.hpp"
#include "core/params/parameter_layout.hpp"
#include "scheduler/plan/plan.hpp"

namespace tandem {

/// Throws MisuseError where the plan was made for another layout.
void require_plan_of(const ParameterLayout& layout, const Plan& plan);

/// Ranks exchange what they have in the order in which their plans lower: where `require_fit` throws on one of them,
/// or plans are not of one kind, this throws on all. `group`: null where there is one rank. Blocks.
void agree_on_plan(Group* group, const Plan& plan, const std::function<void()>& require_fit);

/// The plan, made for this layout, these options and the rank of this group; `group` as above. Throws what
/// `check_options` throws, and MisuseError. Blocks.
const Plan& checked_plan(const Plan& plan, const ParameterLayout& layout, const OffloadOptions& options, Group* group);

}  // namespace tandem
