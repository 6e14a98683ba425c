#include "scheduler/simulator.hpp"

#include <gtest/gtest.h>

#include "core/error.hpp"
#include "tests/scheduler/machines.hpp"

namespace tandem {
namespace {

constexpr std::int64_t layer_elements = std::int64_t{16} << 20;

/// No overheads; DRAM, link and cores so wide that only what a test narrows counts.
MachineProfile ideal() {
  MachineProfile p = testing::desktop();
  p.dram.value = 1e14;
  p.host_stream.value = 1e14;
  p.device_bandwidth.value = 1e14;
  p.device_update.value = 1e13;
  p.to_device.value = p.to_host.value = 1e12;
  p.both_ways.value = 2e12;
  p.cpu_update.value = 1e9;
  return p;
}

std::vector<LayerSeconds> compute_of(int layers, double seconds) {
  return std::vector<LayerSeconds>(static_cast<std::size_t>(layers), {seconds, 2.0 * seconds});
}

TEST(Simulator, AStepWithoutUpdatesIsItsCompute) {
  const ParameterLayout layout = testing::equal_layers(4, layer_elements);
  const Plan plan = testing::plan_for(layout, "device");
  const Simulation s = simulate(layout, plan, ideal(), compute_of(4, 0.1));
  EXPECT_NEAR(s.forward_seconds, 0.4, 0.005);
  EXPECT_NEAR(s.step_seconds, 1.2, 0.01);
  EXPECT_EQ(s.bound_by(), Resource::device);
}

TEST(Simulator, TheCpuUpdateHidesBehindForwardLayerByLayer) {
  const int layers = 8;
  const ParameterLayout layout = testing::equal_layers(layers, layer_elements);
  const Plan plan = testing::plan_for(layout, "host");
  const double update = static_cast<double>(layer_elements) / 1e9;
  // Compute of a layer is longer than its update: only the first is waited for.
  const double forward = 2.0 * update;
  const Simulation s = simulate(layout, plan, ideal(), compute_of(layers, forward));
  EXPECT_NEAR(s.update_seconds, layers * update, 0.01 * layers * update);
  EXPECT_NEAR(s.step_seconds, update + layers * 3.0 * forward, 0.01 * s.step_seconds);
  const Simulation apart = simulate(layout, plan, ideal(), compute_of(layers, forward), {.overlap_updates = false});
  EXPECT_NEAR(apart.step_seconds, layers * (update + 3.0 * forward), 0.01 * apart.step_seconds);
}

TEST(Simulator, TheClosedFormHoldsWhereUpdatesRunAlone) {
  const ParameterLayout layout = testing::equal_layers(64, layer_elements);
  MachineProfile p = testing::desktop();
  for (const char* policy : {"host", "stream"}) {
    const Plan plan = testing::plan_for(layout, policy, layer_elements);
    const Simulation s = simulate(layout, plan, p, compute_of(64, 0.1), {.overlap_updates = false});
    // In the update phase the gradients have crossed the link already.
    const bool cpu = std::string(policy) == "host";
    const double closed = update_seconds(p, {}, static_cast<double>(layout.state_elements()), cpu ? 1.0 : 0.0);
    EXPECT_NEAR(s.update_seconds, closed, 0.10 * closed) << policy;
  }
}

TEST(Simulator, StreamingBothWaysAtOnceMeetsTheCouplingOfTheLink) {
  const ParameterLayout layout = testing::equal_layers(16, layer_elements);
  const Plan plan = testing::plan_for(layout, "stream", layer_elements);
  MachineProfile p = ideal();
  p.to_device.value = p.to_host.value = 10e9;
  const auto update = [&](double both) {
    p.both_ways.value = both;
    return simulate(layout, plan, p, compute_of(16, 0.001), {.overlap_updates = false}).update_seconds;
  };
  const double bytes = 12.0 * static_cast<double>(layout.state_elements());
  EXPECT_NEAR(update(20e9), bytes / 10e9, 0.05 * bytes / 10e9);
  EXPECT_NEAR(update(12e9), 2.0 * bytes / 12e9, 0.05 * 2.0 * bytes / 12e9);
}

TEST(Simulator, DevicesShareTheHost) {
  const ParameterLayout layout = testing::equal_layers(8, layer_elements);
  const Plan plan = testing::plan_for(layout, "host");
  MachineProfile p = testing::desktop();
  const double one = simulate(layout, plan, p, compute_of(8, 0.01)).update_seconds;
  p.devices.value = 4;
  const double four = simulate(layout, plan, p, compute_of(8, 0.01)).update_seconds;
  EXPECT_NEAR(four, 4.0 * one, 0.05 * four);
}

TEST(Simulator, ADeviceMadeOfTheHostsCoresContendsWithTheUpdate) {
  const ParameterLayout layout = testing::equal_layers(8, layer_elements);
  const Plan plan = testing::plan_for(layout, "host");
  MachineProfile p = ideal();
  const double apart = simulate(layout, plan, p, compute_of(8, 0.05)).step_seconds;
  p.device_threads.value = p.cores.value;
  const double together = simulate(layout, plan, p, compute_of(8, 0.05)).step_seconds;
  const double update = static_cast<double>(layout.state_elements()) / 1e9;
  EXPECT_NEAR(together, 8 * 0.15 + update, 0.02 * together);
  EXPECT_LT(apart, together);
}

TEST(Simulator, TheTraceHasEveryTaskOnce) {
  const ParameterLayout layout = testing::equal_layers(4, layer_elements);
  const Plan plan = testing::plan_for(layout, "interleave:2", layer_elements / 4);
  Trace trace;
  const Simulation s = simulate(layout, plan, testing::desktop(), compute_of(4, 0.01), {.trace = &trace});
  // The caller's visits and commits are tasks; its spans are the computations: 3 forward, 4 and 4, as many.
  EXPECT_GT(trace.size(), 0U);
  EXPECT_LE(trace.size(), static_cast<std::size_t>(s.tasks) + 8);
}

TEST(Simulator, IsAFunctionOfItsInputs) {
  const ParameterLayout layout = testing::equal_layers(6, layer_elements);
  const Plan plan = testing::plan_for(layout, "interleave:3,resident=0.2", layer_elements / 3, std::size_t{1} << 30);
  const Simulation a = simulate(layout, plan, testing::desktop(), compute_of(6, 0.02));
  const Simulation b = simulate(layout, plan, testing::desktop(), compute_of(6, 0.02));
  EXPECT_EQ(a.step_seconds, b.step_seconds);
  EXPECT_EQ(a.use, b.use);
}

TEST(Simulator, ASaveBesideTrainingHoldsTheStepsThatItsUpdatesHold) {
  constexpr int layers = 8;
  constexpr double forward = 0.02;
  const ParameterLayout layout = testing::equal_layers(layers, layer_elements);
  MachineProfile p = ideal();
  const double update = static_cast<double>(layer_elements) / p.cpu_update.value;
  for (const char* policy : {"host", "device"}) {
    const Plan plan = testing::plan_for(layout, policy);
    const auto with_disk = [&](double bytes_per_second) {
      p.disk.value = bytes_per_second;
      return simulate(layout, plan, p, compute_of(layers, forward), {.save = true});
    };
    const double alone = simulate(layout, plan, p, compute_of(layers, forward)).step_seconds;
    // As fast as that it is over before any update could wait.
    const Simulation fast = with_disk(1e12);
    EXPECT_EQ(fast.steps, 1);
    EXPECT_NEAR(fast.step_seconds, alone, 1e-6 * alone);
    // The updates of the first step wait, and the next forward waits for them, layer by layer. When all is read, the
    // last layer's update is left, its forward, and backward.
    const Simulation slow = with_disk(1e9);
    const double reading = 12.0 * static_cast<double>(layout.state_elements()) / 1e9;
    const double left = (std::string(policy) == "host" ? update : 0.0) + forward + layers * 2.0 * forward;
    EXPECT_EQ(slow.steps, 2) << policy;
    EXPECT_NEAR(2.0 * slow.step_seconds, reading + left, 0.01 * (reading + left)) << policy;
  }
  p.disk.value = 0.0;
  const Plan plan = testing::plan_for(layout, "host");
  EXPECT_THROW(simulate(layout, plan, p, compute_of(layers, forward), {.save = true}), MisuseError);
}

TEST(Simulator, MicroBatchesRepeatForwardAndBackward) {
  const ParameterLayout layout = testing::equal_layers(4, layer_elements);
  OffloadOptions options;
  options.policy = parse_policy("host");
  options.max_micro_batches = 4;
  const Plan plan = make_plan(layout, options, {std::size_t{1} << 50, 0});
  const double one = simulate(layout, plan, ideal(), compute_of(4, 0.1)).step_seconds;
  const double four = simulate(layout, plan, ideal(), compute_of(4, 0.1), {.micro_batches = 4}).step_seconds;
  EXPECT_NEAR(four - one, 3 * 1.2, 0.05);
  EXPECT_THROW(simulate(layout, plan, ideal(), compute_of(4, 0.1), {.micro_batches = 5}), MisuseError);
  EXPECT_THROW(simulate(layout, plan, ideal(), compute_of(3, 0.1)), MisuseError);
}

// Weights of 2 bytes go up for forward and for backward, gradients of 2 bytes come down in backward, beside the
// weights.
TEST(Simulator, MicroBatchesAtOnceShareEachFetch) {
  constexpr int layers = 32, micro_batches = 4;
  const ParameterLayout layout = testing::equal_layers(layers, layer_elements);
  MachineProfile p = ideal();
  p.to_device.value = p.to_host.value = 10e9;
  p.both_ways.value = 20e9;
  p.cpu_update.value = 1e13;
  for (const int at_once : {1, 2, 4}) {
    OffloadOptions options;
    options.policy = parse_policy("host");
    options.resident_layers = 0;
    options.prefetch_layers = 2;
    options.max_micro_batches = micro_batches;
    options.micro_batches_at_once = at_once;
    const Plan plan = make_plan(layout, options, {std::size_t{1} << 50, 0});
    const Simulation s = simulate(layout, plan, p, compute_of(layers, 1e-7), {.micro_batches = micro_batches});
    const double one_way = 2.0 * static_cast<double>(layout.state_elements()) / p.to_device.value;
    const int gradients = plan.sends_sums ? 1 : at_once;
    EXPECT_EQ(plan.sends_sums, at_once == micro_batches);
    EXPECT_NEAR(s.step_seconds, micro_batches / at_once * (1 + gradients) * one_way, 0.1 * s.step_seconds) << at_once;
    // Arithmetic is the same.
    const double busy =
        simulate(layout, plan, ideal(), compute_of(layers, 0.1), {.micro_batches = micro_batches}).step_seconds;
    EXPECT_NEAR(busy, micro_batches * layers * 0.3, 0.01 * busy) << at_once;
  }
}

TEST(Simulator, AHugePlanUnfoldsAsManyTasksAsItsPieces) {
  const ParameterLayout layout = testing::equal_layers(80, std::int64_t{875'000} * 1024);
  const Plan plan = testing::plan_for(layout, "host", 7000 * 1024);
  ASSERT_EQ(plan.subgroups.size(), 10'000U);
  const Simulation s = simulate(layout, plan, testing::desktop(), compute_of(80, 0.03));
  EXPECT_GT(s.tasks, 200'000);
  EXPECT_EQ(s.bound_by(), Resource::dram);
}

}  // namespace
}  // namespace tandem
