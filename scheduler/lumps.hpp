#pragma once
// Steps with less in them than the plan has, which stand for the whole.
#include <cstdint>

#include "core/parameter_layout.hpp"
#include "scheduler/plan.hpp"
#include "scheduler/walk.hpp"

namespace tandem {

/// Where more micro-batches than `most` pass at once: so many, of which all but the first and the last two stand for
/// several. Each leaves its gradients in the same sum on the device, so that nothing but its own work tells one from
/// another. Of several passes, none has fewer than `micro_batches_of_rates`.
Accumulation in_lumps(const Accumulation& whole, int most) noexcept;
/// The first overlaps with what was before, and the last two with what follows: one stands for all between.
constexpr int fewest_micro_batches = 4;
/// Where inputs wait on the host, work waits for the copies of a few micro-batches before: of none too many at a time.
constexpr int micro_batches_of_inputs = 8;
/// How long the device computes depends on how much of it is beside the sums of gradients: all but the first of what
/// repeats. So many that the first is little of it.
constexpr int micro_batches_of_rates = 64;

/// The plan with those of neighbours that go the same way as one subgroup, and each subgroup as one piece: about so many
/// pieces of each way.
Plan in_lumps(const ParameterLayout& layout, Plan plan, std::int64_t lumps);

}  // namespace tandem
