#include "scheduler/search/upgrades.hpp"

#include <algorithm>
#include <functional>
#include <future>

#include "scheduler/search/auto.hpp"

namespace tandem {

std::vector<Upgrade> upgrades(const ParameterLayout& layout, const OffloadOptions& options, const PlanningFacts& facts,
                              const MachineProfile& profile, std::span<const LayerSeconds> compute,
                              const Plan& chosen) {
  struct Wider {
    std::string what;
    OffloadOptions options;
    PlanningFacts facts;
    MachineProfile profile;
    std::vector<LayerSeconds> compute;
  };
  const std::vector<LayerSeconds> as_it_is(compute.begin(), compute.end());
  std::vector<Wider> machines;
  OffloadOptions roomy = options;
  PlanningFacts room = facts;
  // The caller's own share stays as it is: what is doubled is the whole card.
  if (roomy.device_memory) *roomy.device_memory *= 2;
  room.device_capacity *= 2;
  machines.push_back({"twice the device memory", roomy, room, profile, as_it_is});
  MachineProfile wide = profile;
  for (Figure* f : {&wide.to_device, &wide.to_host, &wide.both_ways}) f->value *= 2.0;
  machines.push_back({"a link of twice the rate", options, facts, wide, as_it_is});
  MachineProfile channels = profile;
  channels.dram.value *= 2.0;
  // The CPU update runs at DRAM's rate where that bounds it: more channels let it rise as far as its cores allow.
  machines.push_back({"twice the DRAM bandwidth", options, facts, channels, as_it_is});
  MachineProfile cores = profile;
  for (Figure* f : {&cores.cores, &cores.cpu_update, &cores.host_stream}) f->value *= 2.0;
  cores.cpu_update_cores.value *= 2.0;
  cores.by_threads.clear();  // figures by thread count hold for the present threads alone
  machines.push_back({"twice the cores", options, facts, cores, as_it_is});
  if (chosen.file_buffers > 0) {
    MachineProfile disk = profile;
    for (Figure* f : {&disk.file_read, &disk.file_write, &disk.file_both_ways}) f->value *= 2.0;
    machines.push_back({"a file of twice the rate", options, facts, disk, as_it_is});
  }
  std::vector<LayerSeconds> fast = as_it_is;
  for (LayerSeconds& s : fast) s = {s.forward / 2.0, s.backward / 2.0};
  machines.push_back({"a device of twice the arithmetic", options, facts, profile, fast});
  // A wider machine may leave its additions unused.
  const double at_most =
      simulate(layout, chosen, profile, compute, {.micro_batches = options.max_micro_batches}).step_seconds;
  const auto seconds_on = [&](const Wider& m) {
    const SearchSettings settings{.present = &chosen, .never_slower_than_fixed = false};
    const Choice choice = choose_plan(layout, m.options, m.facts, m.profile, m.compute, settings);
    return std::min(at_most, choice.simulation.step_seconds);
  };
  // Searches know nothing of each other.
  std::vector<std::future<double>> seconds;
  for (const Wider& m : machines) seconds.push_back(std::async(std::launch::async, seconds_on, std::cref(m)));
  std::vector<Upgrade> list;
  for (std::size_t i = 0; i < machines.size(); ++i) list.push_back({machines[i].what, seconds[i].get()});
  std::stable_sort(list.begin(), list.end(),
                   [](const Upgrade& a, const Upgrade& b) { return a.step_seconds < b.step_seconds; });
  return list;
}

}  // namespace tandem
