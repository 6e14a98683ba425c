#pragma once
// Steps with less in them than the plan has, which stand for the whole.
#include <cstdint>

#include "core/params/parameter_layout.hpp"
#include "scheduler/plan/plan.hpp"
#include "scheduler/plan/walk.hpp"

namespace tandem {

/// Smaller accumulation that stands for `whole` in a simulation: where more than `most` micro-batches pass at once,
/// only `most` of them, of which all but the first and the last two stand for several each. They may, since each leaves
/// its gradients in the same sum on the device, and differs from the others in nothing but its own work. A step of
/// several passes keeps more, up to `micro_batches_of_rates` in each.
Accumulation coarsened(const Accumulation& whole, int most) noexcept;

// Values of `most`.
/// Micro-batches for the seconds of a step. The first overlaps with what was before, and the last two with what
/// follows: one is enough to stand for all between.
constexpr int fewest_micro_batches = 4;
/// Micro-batches for the seconds of a step whose inputs wait on the host. Work then waits for the copies of a few
/// micro-batches before it, and none of these should stand for too many.
constexpr int micro_batches_of_inputs = 8;
/// Micro-batches for the rates that a run measures. How long computing takes depends on how much of it runs beside the
/// sums of gradients, and all micro-batches that repeat each other but the first do: with so many, the first counts for
/// little.
constexpr int micro_batches_of_rates = 64;

/// A plan of about `coarse pieces` pieces for each way of updating: neighbouring subgroups that are updated the same
/// way become one, which goes in a single piece.
Plan coarsened(const ParameterLayout& layout, Plan plan, std::int64_t coarse_pieces);

}  // namespace tandem
