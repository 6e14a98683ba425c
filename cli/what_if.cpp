#include "cli/what_if.hpp"

#include <algorithm>
#include <memory>
#include <utility>

#include "api/open_device.hpp"
#include "core/error.hpp"
#include "train/model_source.hpp"
#include "train/performance.hpp"
#include "train/run_setup.hpp"

namespace tandem {
namespace {

/// Calls `attempt` with each way of keeping activations, the fastest first, until one does not throw PlanError.
template <class Attempt>
void with_activations(const TrainConfig& config, const ModelConfig& model, const MachineProfile& profile, WhatIf& what,
                      Attempt attempt) {
  what.model = model;
  what.layout = frozen_layout(model, config.freeze);
  what.options = offload_options(config);
  what.options.host_memory = config.host_memory;
  what.facts.device_capacity = static_cast<std::size_t>(profile.device_memory.value);
  what.facts.host_available = static_cast<std::size_t>(profile.host_memory.value / profile.devices.value);
  what.shape = run_shape(config, compute_type(config, profile.device_kind), /*training=*/true);
  using namespace literals;
  const std::unique_ptr<Device> rules = open_device("host", {.memory = 64_MiB});  // whose scratch is counted
  while (true) {
    const Transformer transformer(model, what.shape);
    what.options.reserved_device_memory = 0;
    for (const ActivationEntry& entry : transformer.memory(rules->ops())) {
      if (entry.place == Place::device) what.options.reserved_device_memory += align_up(entry.bytes);
    }
    try {
      return attempt();
    } catch (const PlanError&) {
      if (!keep_less(config, what.shape)) throw;
    }
  }
}

}  // namespace

WhatIf plan_for_machine(const TrainConfig& config, const ModelConfig& model, const MachineProfile& profile) {
  WhatIf what;
  with_activations(config, model, profile, what, [&] {
    what.compute = compute_seconds(profile, work_of(model, what.shape));
    what.choice = choose_plan(what.layout, what.options, what.facts, profile, what.compute);
  });
  return what;
}

bool fits_machine(const TrainConfig& config, const ModelConfig& model, const MachineProfile& profile) {
  WhatIf what;
  try {
    with_activations(config, model, profile, what, [&] { make_plan(what.layout, what.options, what.facts); });
    return true;
  } catch (const PlanError&) {
    return false;
  }
}

}  // namespace tandem
