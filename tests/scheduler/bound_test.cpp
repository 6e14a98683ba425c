// Large cases beside what no plan can beat, and the closed form beside the simulator.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>

#include "core/tensor/layout_quantum.hpp"
#include "scheduler/search/auto.hpp"
#include "tests/scheduler/machines.hpp"

namespace tandem {
namespace {

/// Updates behind a forward pass that takes no time; gradients cross during a backward pass that hides them.
struct LargeCase {
  ParameterLayout layout;
  OffloadOptions options;
  PlanningFacts facts;
  MachineProfile machine;
  std::vector<LayerSeconds> compute;
  double room = 0.0;  ///< bytes of the device beside weights and what every plan has there

  explicit LargeCase(std::uint64_t seed) {
    std::mt19937_64 random(seed);
    const int layers = std::uniform_int_distribution<int>(16, 40)(random);
    const std::int64_t pieces = std::uniform_int_distribution<std::int64_t>(8, 12)(random);
    const std::int64_t elements =
        layout_quantum * pieces * std::uniform_int_distribution<std::int64_t>(512, 4096)(random);
    layout = testing::equal_layers(layers, elements);
    options.subgroup_size = elements / pieces;
    machine = testing::random_machine(random);
    options.resident_layers = layers;
    OffloadOptions least = options;
    least.policy = parse_policy("host");
    const auto bytes = static_cast<double>(smallest_device_memory(layout, least));
    const auto all = static_cast<double>(layout.state_elements());
    // Room for buffers of streamed state too.
    room = all * std::uniform_real_distribution<double>(1.0, 8.0)(random);
    facts.device_capacity = static_cast<std::size_t>(bytes + room);
    compute.assign(static_cast<std::size_t>(layers),
                   {0.0, 4.0 * static_cast<double>(elements) / machine.to_host.value});
  }
};

/// The linear program over the shares of the paths: seconds until the busiest resource has done its part, at the best
/// shares that fit. Weights are resident; order, dependencies and pieces are left out, which can only be faster. A
/// parameter takes 14 bytes of the device where it is resident, its gradient included, and 2 where it is streamed and
/// its gradient kept; else that comes back across the link.
double update_bound(const LargeCase& c) {
  constexpr int steps = 400;
  const MachineProfile& p = c.machine;
  const auto all = static_cast<double>(c.layout.state_elements());
  const double most_resident = std::min(1.0, c.room / 14.0 / all);
  double best = std::numeric_limits<double>::infinity();
  for (int i = 0; i <= steps; ++i) {
    const double resident = most_resident * i / steps;
    const double kept_most = (c.room / all - 14.0 * resident) / 2.0;
    for (int j = 0; j <= steps; ++j) {
      const double cpu = (1.0 - resident) * j / steps;
      const double streamed = 1.0 - resident - cpu;
      const double fetched = std::max(0.0, streamed - kept_most);
      const double up = 2.0 * cpu + 12.0 * streamed + 2.0 * fetched;
      const double down = 12.0 * streamed;
      best = std::min(best, std::max({(28.0 * cpu + up + down) / p.dram.value, cpu / p.cpu_update.value,
                                      up / p.to_device.value, down / p.to_host.value, (up + down) / p.both_ways.value,
                                      (streamed + resident) / p.device_update.value}));
    }
  }
  return best * all;
}

TEST(Bound, AutoIsCloseToItInLargeCases) {
  double worst = 1.0;
  for (std::uint64_t seed = 3000; seed < 3020; ++seed) {
    const LargeCase c(seed);
    const Choice choice = choose_plan(c.layout, c.options, c.facts, c.machine, c.compute);
    const double bound = update_bound(c);
    // Forward takes no time, so what it takes is the update.
    const double ratio = choice.simulation.forward_seconds / bound;
    EXPECT_GE(ratio, 1.0) << seed << ": a bound that a plan beats is none";
    EXPECT_GE(choice.plan.subgroups.size(), 128U);
    EXPECT_LE(ratio, 1.10) << seed << ", " << choice.plan.subgroups.size() << " subgroups";
    worst = std::max(worst, ratio);
  }
  RecordProperty("worst_over_bound", std::to_string(worst));
}

/// Weights resident, no state resident, many pieces, nothing else running, and either one path alone or DRAM that both
/// together do not fill: what the closed form assumes. (Where DRAM is full, both paths are slowed alike, also the one
/// that ends last; the closed form takes it that they end together.)
TEST(Bound, TheClosedFormAgreesWithTheSimulatorWhereItsAssumptionsHold) {
  std::mt19937_64 random(11);
  const ParameterLayout layout = testing::equal_layers(48, std::int64_t{8} << 20);
  const auto parameters = static_cast<double>(layout.state_elements());
  const std::vector<LayerSeconds> compute(48, {0.0, 0.01});
  double worst = 0.0;
  for (int round = 0; round < 20; ++round) {
    MachineProfile machine = testing::random_machine(random);
    const int cpu_of_eight = std::uniform_int_distribution<int>(0, 8)(random);
    if (cpu_of_eight % 8 != 0) machine.dram.value = 2e12;
    OffloadOptions options;
    options.policy = parse_policy("static:0");
    options.subgroup_size = std::int64_t{1} << 20;
    std::vector<UpdatePath>& paths = options.paths.emplace();
    for (int i = 0; i < 8 * 48; ++i) {
      paths.push_back(i * cpu_of_eight / 8 != (i + 1) * cpu_of_eight / 8 ? UpdatePath::cpu : UpdatePath::streamed);
    }
    const Plan plan = make_plan(layout, options, {std::size_t{1} << 50, 0});
    const double simulated = simulate(layout, plan, machine, compute, {.overlap_updates = false}).update_seconds;
    // Gradients have crossed when updates begin: 2 bytes fewer through DRAM.
    const PathSetting setting{.cpu_kernel_bytes = machine.cpu_update_bytes.value - 2.0};
    const double closed = update_seconds(machine, setting, parameters, cpu_of_eight / 8.0);
    EXPECT_NEAR(simulated, closed, 0.10 * closed) << "round " << round << ", CPU share " << cpu_of_eight << "/8";
    worst = std::max(worst, std::abs(simulated / closed - 1.0));
  }
  RecordProperty("worst_error", std::to_string(worst));
}

}  // namespace
}  // namespace tandem
