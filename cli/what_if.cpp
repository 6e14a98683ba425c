#include "cli/what_if.hpp"

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "api/open_device.hpp"
#include "core/error.hpp"
#include "train/model_source.hpp"
#include "train/performance.hpp"
#include "train/run_setup.hpp"

namespace tandem {
namespace {

/// What is to be planned, with what is asked of it and the memory there is.
WhatIf described(const TrainConfig& config, const ModelConfig& model, const MachineProfile& profile) {
  WhatIf what;
  what.model = model;
  what.layout = frozen_layout(model, config.freeze);
  what.options = offload_options(config);
  what.options.host_memory = config.host_memory;
  what.facts.device_capacity = static_cast<std::size_t>(profile.device_memory.value);
  what.facts.host_available = static_cast<std::size_t>(profile.host_memory.value / profile.devices.value);
  what.shape = run_shape(config, compute_type(config, profile.device_kind), /*training=*/true);
  return what;
}

/// Makes the options those of the shape. `rules`: the ops whose scratch is counted.
void take_shape(WhatIf& what, const Ops& rules) {
  const Transformer transformer(what.model, what.shape);
  what.options.micro_batches_at_once = static_cast<int>(what.shape.micro_batches);
  what.options.reserved_device_memory = 0;
  for (const ActivationEntry& entry : transformer.memory(rules)) {
    if (entry.place == Place::device) what.options.reserved_device_memory += align_up(entry.bytes);
  }
}

std::unique_ptr<Device> device_of_rules() {
  using namespace literals;
  return open_device("host", {.memory = 64_MiB});
}

void choose(WhatIf& what, const MachineProfile& profile) {
  what.compute = compute_seconds(profile, work_of(what.model, what.shape));
  what.choice = choose_plan(what.layout, what.options, what.facts, profile, what.compute);
}

bool faster(const WhatIf& a, const WhatIf& b) {
  return a.choice.simulation.step_seconds < b.choice.simulation.step_seconds;
}

/// The same with as many micro-batches through each layer at once as fit; none where none do.
std::optional<WhatIf> with_more_at_once(const TrainConfig& config, const Ops& rules, const MachineProfile& profile,
                                        const WhatIf& one) {
  for (const std::int64_t at_once : more_at_once(config, one.shape)) {
    WhatIf more = one;
    more.shape.micro_batches = at_once;
    take_shape(more, rules);
    try {
      choose(more, profile);
      return more;
    } catch (const PlanError&) {  // fewer may fit
      continue;
    }
  }
  return std::nullopt;
}

/// For one way of keeping activations, in the better order of micro-batches. Throws PlanError.
WhatIf in_better_order(const TrainConfig& config, const Ops& rules, const MachineProfile& profile, WhatIf what) {
  take_shape(what, rules);
  choose(what, profile);
  const bool asked = config.accumulation_order != AccumulationOrder::automatic;
  const Plan& plan = what.choice.plan;
  what.order = order_text(plan, asked ? as_asked : "");
  if (!plan.streams_weights() && !plan.sends_gradients()) return what;
  std::optional<WhatIf> more = with_more_at_once(config, rules, profile, what);
  if (!more) {
    if (!more_at_once(config, what.shape).empty()) what.order = order_text(plan, none_fit);
    return what;
  }
  const std::string gain = predicted_gain(more->choice.simulation, what.choice.simulation);
  what.order = order_text(plan, "by layer: " + gain);
  more->order = order_text(more->choice.plan, gain);
  return faster(*more, what) ? *std::move(more) : what;
}

}  // namespace

WhatIf plan_for_machine(const TrainConfig& config, const ModelConfig& model, const MachineProfile& profile) {
  WhatIf what = described(config, model, profile);
  const std::unique_ptr<Device> rules = device_of_rules();
  std::optional<WhatIf> best;
  while (true) {
    try {
      WhatIf way = in_better_order(config, rules->ops(), profile, what);
      if (!best || faster(way, *best)) best = std::move(way);
      if (!keep_less(config, what.shape)) return *std::move(best);
    } catch (const PlanError&) {
      if (keep_less(config, what.shape)) continue;
      if (best) return *std::move(best);
      throw;
    }
  }
}

bool fits_machine(const TrainConfig& config, const ModelConfig& model, const MachineProfile& profile) {
  WhatIf what = described(config, model, profile);
  const std::unique_ptr<Device> rules = device_of_rules();
  do {
    take_shape(what, rules->ops());
    try {
      make_plan(what.layout, what.options, what.facts);
      return true;
    } catch (const PlanError&) {  // what keeps less may fit
      continue;
    }
  } while (keep_less(config, what.shape));
  return false;
}

}  // namespace tandem
