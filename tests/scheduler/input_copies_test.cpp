// Prediction of layers' inputs that are sent to the host and back.
#include "scheduler/simulation/input_copies.hpp"

#include <gtest/gtest.h>

#include <utility>

#include "scheduler/simulation/simulator.hpp"
#include "tests/scheduler/machines.hpp"

namespace tandem {
namespace {

constexpr int layers = 12;
// Inputs that leave the device: those of all layers but the last, less those that stay in a ring of three.
constexpr int leave = layers - 1 - 3;

/// All state on the device, so that nothing crosses the link but inputs: a tenth of a second each, each way.
struct Step {
  ParameterLayout layout = testing::equal_layers(layers, 1 << 20);
  MachineProfile machine = testing::desktop();
  OffloadOptions options;

  Step() {
    options.policy = parse_policy("device");
    options.offloaded_input_bytes = 100'000'000;
    machine.to_device.value = machine.to_host.value = 1e9;
    machine.both_ways.value = 2e9;
    machine.cpu_update.value = machine.device_update.value = 1e13;
  }
  Simulation simulated(LayerSeconds seconds, SimulationOptions how = {}) const {
    const Plan plan = make_plan(layout, options, {std::size_t{1} << 50, 0});
    how.micro_batches = options.max_micro_batches;
    return simulate(layout, plan, machine, std::vector<LayerSeconds>(layers, seconds), how);
  }
};

// Forward ends when the buffer that it writes last has been sent, and backward when the last one is back.
TEST(InputCopies, ANarrowLinkIsWhatForwardAndBackwardWaitFor) {
  Step step;
  const Simulation narrow = step.simulated({0.001, 0.001});
  EXPECT_NEAR(narrow.forward_seconds, 0.1 * leave, 0.03 * leave * 0.1);
  EXPECT_NEAR(narrow.backward_seconds, 0.1 * leave, 0.03 * leave * 0.1);
  EXPECT_TRUE(narrow.bound_by() == Resource::to_host || narrow.bound_by() == Resource::to_device);
  step.options.offloaded_input_bytes = 0;
  EXPECT_LT(step.simulated({0.001, 0.001}).step_seconds, 0.1);
}

TEST(InputCopies, AWideLinkHidesThem) {
  const Simulation s = Step().simulated({0.11, 0.11});
  EXPECT_NEAR(s.step_seconds, layers * 0.22, 0.01 * s.step_seconds);
}

// Copies of the engine meet them on the link.
TEST(InputCopies, ShareTheLinkWithWeights) {
  Step step;
  step.options.policy = parse_policy("host");
  step.options.resident_layers = 0;
  step.options.prefetch_layers = 2;
  const auto seconds = [&](std::size_t bytes) {
    step.options.offloaded_input_bytes = bytes;
    return step.simulated({1e-4, 1e-4}).backward_seconds;
  };
  step.layout = testing::equal_layers(layers, 50 << 20);  // weights of as many bytes as the inputs
  EXPECT_NEAR(seconds(100'000'000) - seconds(0), 0.1 * leave, 0.15 * 0.1 * leave);
}

TEST(InputCopies, MemoryOnTheHostCarriesThem) {
  Step step;
  step.machine.dram.value = 0.5e9;
  EXPECT_NEAR(step.simulated({0.001, 0.001}).step_seconds, 2.0 * 0.2 * leave, 0.03 * 0.4 * leave);
}

// Passes that repeat others, and micro-batches that stand for several.
TEST(InputCopies, AreAsManyWhereMicroBatchesAreNotSimulatedOneByOne) {
  for (const auto& [micro_batches, at_once] : {std::pair{20, 1}, {20, 20}, {23, 5}}) {
    Step step;
    step.options.max_micro_batches = micro_batches;
    step.options.micro_batches_at_once = at_once;
    for (const double compute : {0.01, 0.08}) {
      const Simulation some = step.simulated({compute, compute});
      const Simulation each = step.simulated({compute, compute}, {.each_micro_batch = true});
      EXPECT_NEAR(some.step_seconds, each.step_seconds, 0.05 * each.step_seconds) << at_once << ' ' << compute;
      EXPECT_GT(each.step_seconds, 0.1 * micro_batches * 2 * leave * 0.9) << at_once << ' ' << compute;
    }
  }
}

}  // namespace
}  // namespace tandem
