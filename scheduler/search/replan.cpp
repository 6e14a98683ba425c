#include "scheduler/search/replan.hpp"

#include <algorithm>
#include <array>
#include <utility>

#include "core/base/error.hpp"
#include "core/base/median.hpp"

namespace tandem {
namespace {

using Rate = double StepRates::*;
constexpr std::array all_rates{&StepRates::compute_seconds, &StepRates::to_device, &StepRates::to_host,
                               &StepRates::cpu_update};

StepRates median_of(const std::vector<StepRates>& steps) {
  StepRates middle;
  for (const Rate rate : all_rates) {
    std::vector<double> values;
    for (const StepRates& s : steps) {
      if (s.*rate > 0.0) values.push_back(s.*rate);  // else that step does not tell
    }
    if (!values.empty()) middle.*rate = median(std::move(values));
  }
  return middle;
}

/// How many times the predicted figure the measured one is; 1 where one of them is missing.
double ratio(const StepRates& measured, const StepRates& predicted, Rate rate) {
  return measured.*rate > 0.0 && predicted.*rate > 0.0 ? measured.*rate / predicted.*rate : 1.0;
}

/// The plan with every subgroup that is not resident on one path; none where it does not fit.
std::optional<Plan> with_all(UpdatePath path, const Plan& plan, const ParameterLayout& layout, OffloadOptions options,
                             const PlanningFacts& facts) {
  options.policy = Policy::static_share(0.0);
  // Memory for updates ahead of the norm takes the room that is left then.
  if (options.speculate == Speculate::automatic) options.speculate = Speculate::off;
  std::vector<UpdatePath>& paths = options.paths.emplace();
  for (const Subgroup& s : plan.subgroups) {
    paths.push_back(s.tier == Tier::device ? UpdatePath::resident : path);
  }
  return find_plan(layout, options, facts);
}

}  // namespace

void book_room_for_change(Plan& plan, const ParameterLayout& layout, const OffloadOptions& options,
                          const PlanningFacts& facts) {
  std::size_t device = plan.memory.device_bytes();
  std::size_t host = plan.memory.host_bytes();
  for (const UpdatePath path : {UpdatePath::cpu, UpdatePath::streamed}) {
    const std::optional<Plan> other = with_all(path, plan, layout, options, facts);
    if (!other) continue;
    const std::size_t more_device = std::max(device, other->memory.device_bytes());
    const std::size_t more_host = std::max(host, other->memory.host_bytes());
    // Each alone may fit, and yet not the most of either, where both come out of the same memory.
    if (over_host_memory(options, facts, more_host + options.reserved_host_memory,
                         more_device + options.reserved_device_memory + facts.device_reserved) > 0) {
      continue;
    }
    if (more_device + page_table_bytes(more_host, facts, plan.rank) + options.reserved_device_memory +
            facts.device_reserved >
        plan.device_memory) {
      continue;
    }
    device = more_device;
    host = more_host;
  }
  plan.spare_device_memory = device - plan.memory.device_bytes();
  plan.spare_host_memory = host - plan.memory.host_bytes();
  plan.memory.add("spare", "run", Place::device, plan.spare_device_memory);
  plan.memory.add("spare", "run", Place::pinned, plan.spare_host_memory);
  plan.page_tables = page_table_bytes(host, facts, plan.rank);
}

Replanner::Replanner(const ParameterLayout& layout, const OffloadOptions& options, const PlanningFacts& facts,
                     MachineProfile profile, std::vector<LayerSeconds> compute, Plan plan, const Simulation& predicted,
                     ReplanSettings settings)
    : layout_(layout),
      options_(options),
      facts_(facts),
      profile_(std::move(profile)),
      compute_(std::move(compute)),
      plan_(std::move(plan)),
      predicted_(predicted.rates),
      settings_(settings),
      warming_up_(settings.window) {
  // Within what is booked.
  options_.state_folder.reset();
  options_.device_memory = plan_.memory.device_bytes() + options_.reserved_device_memory + facts_.device_reserved;
  options_.host_memory = plan_.memory.host_bytes() + options_.reserved_host_memory;
  facts_.host_available = 0;
  facts_.pinned_per_page_table = 0;  // the driver's page tables are taken already
}

std::optional<Replanner::Change> Replanner::after_step(const StepRates& measured) {
  if (warming_up_ > 0) {
    --warming_up_;
    return std::nullopt;
  }
  steps_.push_back(measured);
  if (static_cast<int>(steps_.size()) < settings_.window) return std::nullopt;
  const StepRates typical = median_of(std::exchange(steps_, {}));
  if (as_predicted(typical)) return std::nullopt;
  correct(typical);
  return choose_anew();
}

bool Replanner::as_predicted(const StepRates& measured) const {
  return std::all_of(all_rates.begin(), all_rates.end(), [&](Rate rate) {
    const double off = ratio(measured, predicted_, rate);
    return off <= settings_.band && off >= 1.0 / settings_.band;
  });
}

void Replanner::correct(const StepRates& measured) {
  const double compute = ratio(measured, predicted_, &StepRates::compute_seconds);
  for (LayerSeconds& s : compute_) s = {s.forward * compute, s.backward * compute};
  const double up = ratio(measured, predicted_, &StepRates::to_device);
  const double down = ratio(measured, predicted_, &StepRates::to_host);
  profile_.to_device.value *= up;
  profile_.to_host.value *= down;
  profile_.both_ways.value *= (up + down) / 2.0;
  profile_.cpu_update.value *= ratio(measured, predicted_, &StepRates::cpu_update);
}

std::optional<Replanner::Change> Replanner::choose_anew() {
  const Simulation now = simulate(layout_, plan_, profile_, compute_,
                                  {.micro_batches = options_.max_micro_batches, .measured_rates = true});
  Choice choice = choose_plan(layout_, options_, facts_, profile_, compute_, {.present = &plan_});
  choice.plan.page_tables = plan_.page_tables;
  const double gain = 1.0 - choice.simulation.step_seconds / now.step_seconds;
  if (gain < settings_.worthwhile) {
    predicted_ = now.rates;
    return std::nullopt;
  }
  predicted_ = choice.simulation.rates;
  plan_ = choice.plan;
  warming_up_ = settings_.window;
  return Change{std::move(choice.plan), now.step_seconds, choice.simulation.step_seconds};
}

}  // namespace tandem
