#include "cli/what_if.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "api/ops_rules.hpp"
#include "core/base/error.hpp"
#include "core/device/cuda_memory.hpp"
#include "core/device/device_name.hpp"
#include "train/hf/model_source.hpp"
#include "train/setup/fastest_shape.hpp"
#include "train/setup/performance.hpp"
#include "train/setup/run_setup.hpp"

namespace tandem {
namespace {

/// Bytes of a host's memory that are no run's. Elsewhere nobody can ask the system how much of it is available, so they
/// are assumed: the system's descriptions of pages (64 bytes for each of 4 KiB) and 3 GiB for firmware, services and a
/// desktop; of a small host half.
std::size_t os_reserved_bytes(std::size_t host) {
  using namespace literals;
  return std::min(host / 2, 3_GiB + host / 64);
}

/// What is to be planned, with what is asked of it and the memory there is. Throws PlanError where more is asked for.
WhatIf described(const TrainConfig& config, const ModelConfig& model, const MachineProfile& profile) {
  const auto ranks = split_device_names(config.device).size();
  require_file_rates(config, profile);
  WhatIf what;
  what.model = model;
  what.options = offload_options(config);
  what.options.rank.count = static_cast<int>(ranks);
  auto memory = static_cast<std::size_t>(profile.device_memory.value);
  if (config.device_memory > memory && memory > 0) {
    throw PlanError(fmt::format("--device-memory {}", format_bytes(config.device_memory)),
                    fmt::format("the device of this profile has {}", format_bytes(memory)),
                    "leave it out, or edit the profile");
  }
  if (profile.device_kind == "cuda") {
    if (config.device_memory == 0) memory = default_cuda_ceiling(memory);
    what.facts.device_reserved = std::min(assumed_cuda_context, memory);
    what.facts.pinned_per_page_table = pinned_per_cuda_page_table;
  }
  what.facts.device_capacity = memory - what.facts.device_reserved;
  const auto host = static_cast<std::size_t>(profile.host_memory.value);
  // What is not this run's has its part of the host; ranks have theirs together.
  const auto devices = ranks > 1 ? std::size_t{1} : static_cast<std::size_t>(profile.devices.value);
  what.facts.host_available = (host - os_reserved_bytes(host)) / devices;
  what.facts.host_limit = host / devices;  // a ceiling above what is left to it is believed up to here
  what.facts.device_is_host = profile.device_kind == "host";
  what.shape = run_shape(config, model, compute_type(config, profile.device_kind), /*training=*/true);
  what.layout = training_layout(config, model, what.shape);
  return what;
}

/// `rules`: of the ops whose scratch is counted.
void take_shape(WhatIf& what, const RunShape& shape, const OpsRules& rules) {
  what.shape = shape;
  const Transformer transformer(what.model, what.shape);
  set_shape(what.options, what.model, shape);
  std::size_t device = 0;
  std::size_t host = 0;
  for (const ActivationEntry& entry : transformer.memory(rules)) {
    (entry.place == Place::device ? device : host) += align_up(entry.bytes);
  }
  what.options.reserved_device_memory = device + page_table_bytes(host, what.facts, what.options.rank);
  what.options.reserved_host_memory = host;
}

/// Scratch memory of a host goes by the threads of the device that is planned for, not of the machine that plans.
std::unique_ptr<OpsRules> rules_for(const TrainConfig& config, const MachineProfile& profile) {
  const double all = (profile.device_threads.known() ? profile.device_threads : profile.cores).value;
  return rules_of(profile.device_kind, config.threads > 0 ? config.threads : static_cast<int>(all));
}

}  // namespace

WhatIf plan_for_machine(const TrainConfig& of_all, const ModelConfig& model, const MachineProfile& profile) {
  const TrainConfig config = config_of_rank(of_all);
  WhatIf what = described(config, model, profile);
  const std::unique_ptr<OpsRules> rules = rules_for(config, profile);
  ShapeMachine machine;
  machine.compute = [&](const RunShape& shape) { return compute_seconds(profile, work_of(model, shape)); };
  machine.fits = [&](const RunShape& shape) {
    take_shape(what, shape, *rules);
    return find_plan(what.layout, what.options, what.facts).has_value();
  };
  machine.choose = [&](const RunShape& shape, std::span<const LayerSeconds> layers, double faster_than) {
    take_shape(what, shape, *rules);
    return choose_plan(what.layout, what.options, what.facts, profile, layers, {.faster_than = faster_than});
  };
  FastestShape best = fastest_shape(config, model, what.shape, machine);
  take_shape(what, best.shape, *rules);
  what.compute = std::move(best.compute);
  what.choice = std::move(best.choice);
  what.order = order_text(what.choice.plan, best.why);
  return what;
}

void require_fit(const TrainConfig& of_all, const ModelConfig& model, const MachineProfile& profile) {
  const TrainConfig config = config_of_rank(of_all);
  WhatIf what = described(config, model, profile);
  const std::unique_ptr<OpsRules> rules = rules_for(config, profile);
  do {
    std::vector<std::int64_t> orders = more_at_once(config, what.shape);
    orders.push_back(what.shape.micro_batches);  // the last: what keeps less is of that order, and so is a refusal
    for (const std::int64_t at_once : orders) {
      RunShape shape = what.shape;
      shape.micro_batches = at_once;
      take_shape(what, shape, *rules);
      if (some_policy_fits(what.layout, what.options, what.facts)) return;
    }
  } while (keep_less(config, what.model, what.shape));  // what keeps less may fit
  take_shape(what, what.shape, *rules);
  static_cast<void>(make_plan(what.layout, what.options, what.facts));
}

}  // namespace tandem
