// Large cases beside what no plan can beat, and the closed form beside the simulator.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "core/update_kernels.hpp"
#include "scheduler/auto.hpp"
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
  double most_resident = 0.0;  ///< parameters

  explicit LargeCase(std::uint64_t seed) {
    std::mt19937_64 random(seed);
    const int layers = std::uniform_int_distribution<int>(16, 40)(random);
    const std::int64_t pieces = std::uniform_int_distribution<std::int64_t>(4, 12)(random);
    const std::int64_t elements =
        layout_quantum * pieces * std::uniform_int_distribution<std::int64_t>(512, 4096)(random);
    layout = testing::equal_layers(layers, elements);
    options.subgroup_size = elements / pieces;
    machine = testing::random_machine(random);
    OffloadOptions least = options;
    least.policy = parse_policy("host");
    least.resident_layers = layers;
    const auto bytes = static_cast<double>(smallest_device_memory(layout, least));
    const auto all = static_cast<double>(layout.state_elements());
    // Room for buffers of streamed state too.
    const double room = 12.0 * (0.1 * all + all * std::uniform_real_distribution<double>(0.0, 0.6)(random));
    facts.device_capacity = static_cast<std::size_t>(bytes + room);
    most_resident = room / 12.0;
    compute.assign(static_cast<std::size_t>(layers),
                   {0.0, 40.0 * static_cast<double>(elements) / machine.to_host.value});
  }
};

/// The linear program over the shares of the three paths: seconds until the busiest resource has done its part, at the
/// best shares. Weights are resident and gradients have crossed; order, dependencies and pieces are left out, which can
/// only be faster.
double update_bound(const MachineProfile& p, double parameters, double resident) {
  constexpr int steps = 2000;
  const double rest = std::max(0.0, parameters - resident);
  double best = 1e300;
  for (int i = 0; i <= steps; ++i) {
    const double cpu = rest * i / steps;
    const double streamed = rest - cpu;
    best = std::min(
        best,
        std::max({(30.0 * cpu + 24.0 * streamed) / p.dram.value, cpu / p.cpu_update.value,
                  (2.0 * cpu + 12.0 * streamed) / p.to_device.value, 12.0 * streamed / p.to_host.value,
                  (2.0 * cpu + 24.0 * streamed) / p.both_ways.value, (parameters - cpu) / p.device_update.value}));
  }
  return best;
}

TEST(Bound, AutoIsCloseToItInLargeCases) {
  double worst = 1.0;
  for (std::uint64_t seed = 3000; seed < 3020; ++seed) {
    const LargeCase c(seed);
    const Choice choice = choose_plan(c.layout, c.options, c.facts, c.machine, c.compute);
    const Plan::Shares shares = choice.plan.shares();
    ASSERT_LE(static_cast<double>(shares.resident), c.most_resident) << seed;
    const double bound = update_bound(c.machine, static_cast<double>(c.layout.state_elements()), c.most_resident);
    const double ratio = choice.simulation.update_seconds / bound;
    EXPECT_GE(ratio, 1.0) << seed << ": a bound that a plan beats is none";
    EXPECT_LE(ratio, 1.10) << seed << ", " << choice.plan.subgroups.size() << " subgroups";
    worst = std::max(worst, ratio);
  }
  RecordProperty("worst_over_bound", std::to_string(worst));
}

/// Weights resident, no state resident, many pieces, nothing else running: what the closed form assumes.
TEST(Bound, TheClosedFormAgreesWithTheSimulatorWhereItsAssumptionsHold) {
  std::mt19937_64 random(11);
  const ParameterLayout layout = testing::equal_layers(48, std::int64_t{8} << 20);
  const auto parameters = static_cast<double>(layout.state_elements());
  const std::vector<LayerSeconds> compute(48, {0.0, 0.01});
  double worst = 0.0;
  for (int round = 0; round < 20; ++round) {
    const MachineProfile machine = testing::random_machine(random);
    const int cpu_of_eight = std::uniform_int_distribution<int>(0, 8)(random);
    OffloadOptions options;
    options.policy = parse_policy("static:0");
    options.subgroup_size = std::int64_t{1} << 20;
    for (int i = 0; i < 8 * 48; ++i) {
      options.paths.push_back(i * cpu_of_eight / 8 != (i + 1) * cpu_of_eight / 8 ? UpdatePath::cpu
                                                                                 : UpdatePath::streamed);
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
