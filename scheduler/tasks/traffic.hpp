#pragma once
// Bytes that a plan moves across the link, by lowering it as a training run does.
#include <cstdint>

#include "core/params/parameter_layout.hpp"
#include "scheduler/plan/plan.hpp"

namespace tandem {

struct Traffic {
  std::uint64_t host_to_device = 0;
  std::uint64_t device_to_host = 0;
  std::uint64_t from_peers = 0;  ///< other ranks' weights and gradients
};

/// Bytes of one step in the steady state, without those of a cold start: `micro_batches` forwards in layer order and
/// backwards in its reverse, as many at once as the plan has pass through, none skipped, no evaluation between.
Traffic traffic_of_step(const ParameterLayout& layout, Plan plan, int micro_batches);

}  // namespace tandem
