#include "scheduler/simulation/simulator.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "core/base/error.hpp"
#include "scheduler/simulation/coarsening.hpp"
#include "scheduler/simulation/step_simulator.hpp"

namespace tandem {

Resource Simulation::bound_by() const noexcept {
  const auto of = [this](Resource resource) { return use[static_cast<std::size_t>(resource)]; };
  ResourceShares counted = use;
  counted[static_cast<std::size_t>(Resource::cores)] -= cores_of_device;
  const auto most = static_cast<Resource>(std::max_element(counted.begin(), counted.end()) - counted.begin());
  if (most != Resource::link) return most;
  return of(Resource::to_host) > of(Resource::to_device) ? Resource::to_host : Resource::to_device;
}

Simulation simulate(const ParameterLayout& layout, const Plan& plan, const MachineProfile& profile,
                    std::span<const LayerSeconds> compute, const SimulationOptions& options) {
  const std::size_t layers = layout.layers().size();
  if (plan.layers.size() != layers || compute.size() != layers) {
    throw MisuseError(fmt::format("simulation of {} layers", layers),
                      fmt::format("the plan has {}, and seconds are given of {}", plan.layers.size(), compute.size()));
  }
  if (options.micro_batches < 1 || options.micro_batches > plan.max_micro_batches) {
    throw MisuseError(fmt::format("simulation of {} micro-batches", options.micro_batches),
                      fmt::format("the plan allows 1 to {}", plan.max_micro_batches));
  }
  const Accumulation whole{options.micro_batches, std::min(plan.micro_batches_at_once, options.micro_batches)};
  const bool each = options.trace != nullptr || options.each_micro_batch;
  const int fewest = plan.offloaded_input_bytes > 0 ? micro_batches_of_inputs : fewest_micro_batches;
  const int most = options.measured_rates ? micro_batches_of_rates : fewest;
  const Accumulation walked = each ? whole : coarsened(whole, most);
  SimulationMemory own;
  SimulationMemory& memory = options.memory == nullptr ? own : *options.memory;
  const auto run = [&](const Plan& simulated, std::int64_t piece) {
    return Simulator(layout, simulated, profile, compute, options, walked, whole, piece, memory).run();
  };
  const bool as_planned =
      plan.max_micro_batches == walked.micro_batches && plan.micro_batches_at_once == walked.at_once;
  if (as_planned && options.coarse_pieces == 0) return run(plan, 0);
  Plan simulated = plan;
  simulated.max_micro_batches = walked.micro_batches;
  simulated.micro_batches_at_once = walked.at_once;
  if (options.coarse_pieces == 0) return run(simulated, 0);
  return run(coarsened(layout, std::move(simulated), options.coarse_pieces), plan.piece_elements);
}

}  // namespace tandem
