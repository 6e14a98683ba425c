// Simulated steps against closed forms.
#include "scheduler/simulation/simulator.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <random>
#include <utility>

#include "core/base/error.hpp"
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

TEST(Simulator, PhasesAreOfAllMicroBatches) {
  const ParameterLayout layout = testing::equal_layers(4, layer_elements);
  for (const auto& [micro_batches, at_once] : {std::pair{6, 1}, {6, 2}, {6, 6}, {40, 1}}) {
    OffloadOptions options;
    options.policy = Policy::device();
    options.max_micro_batches = micro_batches;
    options.micro_batches_at_once = at_once;
    const Plan plan = make_plan(layout, options, {std::size_t{1} << 50, 0});
    const Simulation s = simulate(layout, plan, ideal(), compute_of(4, 0.1), {.micro_batches = micro_batches});
    // The last layer is used for forward and backward at once: of several micro-batches, all but the first begin it in
    // backward.
    const int passes = micro_batches / at_once;
    const double forward = 0.3 * micro_batches + 0.1 * passes;
    EXPECT_NEAR(s.forward_seconds, forward, 0.01 * micro_batches) << micro_batches << " " << at_once;
    EXPECT_NEAR(s.backward_seconds, 1.2 * micro_batches - forward, 0.01 * micro_batches)
        << micro_batches << " " << at_once;
  }
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
  EXPECT_NEAR(s.exposed_update_seconds, update, 0.01 * update);
  const Simulation apart = simulate(layout, plan, ideal(), compute_of(layers, forward), {.overlap_updates = false});
  EXPECT_NEAR(apart.step_seconds, layers * (update + 3.0 * forward), 0.01 * apart.step_seconds);
  EXPECT_NEAR(apart.exposed_update_seconds, layers * update, 0.01 * layers * update);
}

// An update that takes longer than backward is bound by the CPU alone: it stands still from the last update of a step
// to the first gradient of the next. That takes updates of low layers first, as the next forward waits for these first.
TEST(Simulator, UpdatesInBackwardLeaveTheCpuIdleForOneLayerAlone) {
  const int layers = 8;
  const ParameterLayout layout = testing::equal_layers(layers, layer_elements);
  OffloadOptions options;
  options.policy = parse_policy("host");
  options.subgroup_size = layer_elements / 16;
  options.on_nonfinite = OnNonfinite::stop;
  const auto step = [&](bool clips) {
    options.clips = clips;
    const Plan plan = make_plan(layout, options, {std::size_t{1} << 50, 0});
    EXPECT_EQ(plan.updates_in_backward, !clips);
    return [&, plan](double forward) { return simulate(layout, plan, ideal(), compute_of(layers, forward)); };
  };
  const double update = layers * static_cast<double>(layer_elements) / 1e9;
  const double forward = update / 48.0;
  EXPECT_NEAR(step(false)(forward).step_seconds, update + 3.0 * forward, 0.02 * update);
  EXPECT_NEAR(step(true)(forward).step_seconds, update + 3.0 * forward + 2.0 * (layers - 1) * forward, 0.02 * update);
  // One that is shorter is hidden, but for what the first layer's own takes.
  const double longer = update;
  EXPECT_NEAR(step(false)(longer).step_seconds, layers * 3.0 * longer + update / layers, 0.01 * layers * longer);
  EXPECT_NEAR(step(false)(longer).exposed_update_seconds, update / layers, 0.02 * update / layers);
}

// An update before the norm is known, of a step that is not clipped, is one in backward, but for its record.
TEST(Simulator, UpdatesBeforeTheNormAreThoseInBackwardWithARecord) {
  const int layers = 8;
  const ParameterLayout layout = testing::equal_layers(layers, layer_elements);
  OffloadOptions options;
  options.policy = parse_policy("host");
  options.subgroup_size = layer_elements / 16;
  const auto step = [&](Speculate speculate, bool clips, double forward) {
    options.speculate = speculate;
    options.clips = clips;
    options.on_nonfinite = clips ? OnNonfinite::skip : OnNonfinite::stop;
    const Plan plan = make_plan(layout, options, {std::size_t{1} << 50, 0});
    EXPECT_EQ(plan.speculates(), speculate != Speculate::off);
    return simulate(layout, plan, ideal(), compute_of(layers, forward));
  };
  const double update = layers * static_cast<double>(layer_elements) / 1e9;
  for (const double forward : {update / 48.0, update / 12.0, update}) {
    const double in_backward = step(Speculate::off, false, forward).step_seconds;
    const double waiting = step(Speculate::off, true, forward).step_seconds;
    const Simulation s = step(Speculate::on, true, forward);
    EXPECT_NEAR(s.step_seconds, in_backward, 0.05 * update) << forward / update;
    EXPECT_GE(s.step_seconds, in_backward * (1.0 - 1e-9));
    EXPECT_LT(s.step_seconds, waiting * 1.001);
    EXPECT_EQ(step(Speculate::automatic, true, forward).step_seconds, waiting) << "what norms will be is not known";
  }
  const double on = step(Speculate::on, true, update / 12.0).step_seconds;
  EXPECT_LT(on, 0.9 * step(Speculate::off, true, update / 12.0).step_seconds);
}

// State on its way back is nobody's to wait for: neither do gradients, of which there are none yet, hold it up, nor is
// it part of the update.
TEST(Simulator, TheUpdateEndsWithTheLastNewWeights) {
  const int layers = 8;
  const ParameterLayout layout = testing::equal_layers(layers, layer_elements);
  MachineProfile p = ideal();
  p.to_device.value = 100e9;
  p.to_host.value = 20e9;
  p.both_ways.value = 120e9;
  OffloadOptions options;
  options.policy = parse_policy("stream");
  const Plan plan = make_plan(layout, options, {std::size_t{1} << 50, 0});
  const Simulation s = simulate(layout, plan, p, compute_of(layers, 0.1));
  const double stored = 12.0 * static_cast<double>(layout.state_elements()) / p.to_host.value;
  const double in_buffers =
      12.0 * static_cast<double>(plan.state_buffers) * static_cast<double>(plan.piece_elements) / p.to_host.value;
  EXPECT_LT(s.update_seconds, stored);
  EXPECT_GT(s.update_seconds, stored - 1.5 * in_buffers);
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
  // The caller's uses and commits are tasks; its spans are the computations: 3 forward, 4 and 4, as many.
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
    // A disk so fast that the save is over before any update could wait.
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

TEST(Simulator, ADiskThatWritesBesideAStepTakesItsShareOfCoresAndMemory) {
  const ParameterLayout layout = testing::equal_layers(8, layer_elements);
  const Plan plan = testing::plan_for(layout, "device");
  MachineProfile p = ideal();
  p.disk.value = 1e9;
  p.disk_cores.value = 0.5 * p.cores.value;
  const auto with_share = [&](double share) {
    return simulate(layout, plan, p, compute_of(8, 0.05), {.disk_share = share}).step_seconds;
  };
  EXPECT_EQ(with_share(1.0), with_share(0.0)) << "the device has cores of its own";
  // With the host's it needs all of them: both go at the rate at which together they take all.
  p.device_threads.value = p.cores.value;
  const double alone = with_share(0.0);
  EXPECT_NEAR(with_share(0.5), 1.25 * alone, 1e-3 * alone);
  EXPECT_NEAR(with_share(1.0), 1.5 * alone, 1e-3 * alone);
  // An update on the CPU that memory bounds: three bytes of it for each to the disk.
  p = ideal();
  p.cpu_update_bytes.value = p.dram.value / p.cpu_update.value;
  p.disk.value = p.dram.value / 10.0;
  const Plan host = testing::plan_for(layout, "host");
  const auto update = [&](double share) {
    return simulate(layout, host, p, compute_of(8, 0.05), {.overlap_updates = false, .disk_share = share})
        .update_seconds;
  };
  EXPECT_NEAR(update(1.0), 1.3 * update(0.0), 1e-3 * update(0.0));
  p.disk.value = 0.0;
  EXPECT_THROW(update(1.0), MisuseError);
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
    const int passes = micro_batches / at_once;
    EXPECT_NEAR(s.step_seconds, passes * (1 + gradients) * one_way, 0.1 * s.step_seconds) << at_once;
    // Arithmetic is the same.
    const double busy =
        simulate(layout, plan, ideal(), compute_of(layers, 0.1), {.micro_batches = micro_batches}).step_seconds;
    EXPECT_NEAR(busy, micro_batches * layers * 0.3, 0.01 * busy) << at_once;
  }
}

/// Layers of a large model on a random machine, with so many micro-batches.
struct LargeStep {
  LargeStep(std::uint64_t seed, const char* policy, int micro_batches, int at_once)
      : random(seed), layout(testing::equal_layers(12, 14 * layer_elements)), machine(testing::random_machine(random)) {
    OffloadOptions options;
    options.policy = parse_policy(policy);
    options.max_micro_batches = micro_batches;
    options.micro_batches_at_once = at_once;
    plan = make_plan(layout, options, {std::size_t{1} << 50, 0});
    const double update = static_cast<double>(14 * layer_elements) / machine.cpu_update.value;
    compute = compute_of(12, update * testing::spread(random, 0.05, 1.0));
  }
  Simulation simulated(SimulationOptions options) const {
    options.micro_batches = plan.max_micro_batches;
    return simulate(layout, plan, machine, compute, options);
  }

  std::mt19937_64 random;
  ParameterLayout layout;
  MachineProfile machine;
  Plan plan;
  std::vector<LayerSeconds> compute;
};

TEST(Simulator, CoarsePiecesTakeAsLongAsTheirPiecesInFarFewerTasks) {
  double worst = 0.0;
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    for (const char* policy : {"host", "stream", "interleave:3", "static:0.5"}) {
      for (const auto& [micro_batches, at_once] : {std::pair{1, 1}, {8, 1}, {8, 8}, {12, 3}}) {
        const LargeStep step(seed, policy, micro_batches, at_once);
        const Simulation exact = step.simulated({.each_micro_batch = true});
        // Number of pieces that the search takes, which is smaller for passes of several micro-batches.
        const Simulation coarse_pieces =
            step.simulated({.coarse_pieces = 1 < at_once && at_once < micro_batches ? 120 : 300});
        const double error = std::abs(coarse_pieces.step_seconds / exact.step_seconds - 1.0);
        EXPECT_LT(error, 0.05) << seed << ' ' << policy << ' ' << micro_batches << ' ' << at_once;
        // Norms and updates of a subgroup are no pieces: with a single micro-batch they are more of the tasks.
        const double fewer = micro_batches == 1 ? 2.5 : 3.0;
        EXPECT_LT(static_cast<double>(coarse_pieces.tasks) * fewer, static_cast<double>(exact.tasks))
            << seed << ' ' << policy << ' ' << micro_batches << ' ' << at_once;
        worst = std::max(worst, error);
      }
    }
  }
  RecordProperty("worst_error", std::to_string(worst));
}

// Neighbours that go different ways, too: those of either way are one coarse piece.
TEST(Simulator, CoarsePiecesAreAsManyHoweverSmallSubgroupsAre) {
  const ParameterLayout layout = testing::equal_layers(12, 4 * layer_elements);
  for (const char* policy : {"interleave:2", "interleave:3,resident=0.3"}) {
    const auto simulated = [&](std::int64_t size, std::int64_t coarse_pieces) {
      const Plan plan = testing::plan_for(layout, policy, size);
      MachineProfile machine = testing::desktop();
      machine.task_overhead.value = 1e-6;
      return simulate(layout, plan, machine, compute_of(12, 0.01), {.coarse_pieces = coarse_pieces});
    };
    const Simulation small = simulated(1 << 14, 300);
    EXPECT_LT(small.tasks, 2 * simulated(1 << 20, 300).tasks) << policy;
    const Simulation exact = simulated(1 << 14, 0);
    EXPECT_GT(exact.tasks, 50 * small.tasks) << policy;
    EXPECT_NEAR(small.step_seconds, exact.step_seconds, 0.05 * exact.step_seconds) << policy;
  }
}

void expect_same(const Simulation& a, const Simulation& b, const std::string& what) {
  const auto same = [&](double x, double y) { EXPECT_NEAR(x, y, 1e-6 * std::abs(y)) << what; };
  same(a.step_seconds, b.step_seconds);
  same(a.forward_seconds, b.forward_seconds);
  same(a.backward_seconds, b.backward_seconds);
  same(a.update_seconds, b.update_seconds);
  same(a.exposed_update_seconds, b.exposed_update_seconds);
  for (std::size_t r = 0; r < a.use.size(); ++r) same(a.use[r], b.use[r]);
  same(a.rates.to_device, b.rates.to_device);
  same(a.rates.to_host, b.rates.to_host);
  same(a.rates.cpu_update, b.rates.cpu_update);
}

// Seeds 8 and 11 take several passes until the CPU's folding of gradients is what a pass waits for.
TEST(Simulator, MicroBatchesThatRepeatOthersNeedNotBeSimulated) {
  for (const std::uint64_t seed : {0U, 5U, 8U, 11U}) {
    for (const char* policy : {"host", "stream", "interleave:3", "static:0.5"}) {
      for (const auto& [micro_batches, at_once] : {std::pair{20, 1}, {29, 3}, {20, 20}, {32, 4}}) {
        const std::string what = fmt::format("seed {} {} {} {}", seed, policy, micro_batches, at_once);
        const LargeStep step(seed, policy, micro_batches, at_once);
        const Simulation each = step.simulated({.each_micro_batch = true});
        const Simulation some = step.simulated({});
        expect_same(some, each, what);
        // All at once contend with their own sums in another order; passes are alike in everything.
        const Simulation measured = at_once < micro_batches ? some : step.simulated({.measured_rates = true});
        EXPECT_NEAR(measured.rates.compute_seconds, each.rates.compute_seconds, 1e-6 * each.rates.compute_seconds)
            << what;
        EXPECT_LT(some.tasks, each.tasks * 4 / 5) << what;
      }
    }
  }
}

// One by one they would take up to 500 / 64 times as many tasks. What each of several passes sends for each micro-batch
// it sends in larger pieces.
TEST(Simulator, SomeOfManyMicroBatchesAtOnceStandForTheOthers) {
  std::array<double, 2> worst{};
  for (const std::uint64_t seed : {5U, 11U}) {
    for (const auto& [micro_batches, at_once] : {std::pair{500, 500}, {300, 150}, {260, 130}}) {
      const std::string what = fmt::format("seed {}, {} by {}", seed, micro_batches, at_once);
      const LargeStep step(seed, "host", micro_batches, at_once);
      const Simulation each = step.simulated({.each_micro_batch = true});
      const Simulation some = step.simulated({.measured_rates = true});
      const auto close = [&](double a, double b, double most, double& worst_of) {
        EXPECT_NEAR(a, b, most * b) << what;
        worst_of = std::max(worst_of, std::abs(a / b - 1.0));
      };
      close(some.step_seconds, each.step_seconds, 0.005, worst[0]);
      for (const auto rate :
           {&StepRates::compute_seconds, &StepRates::to_device, &StepRates::to_host, &StepRates::cpu_update}) {
        close(some.rates.*rate, each.rates.*rate, 0.01, worst[1]);
      }
      EXPECT_LT(some.tasks * 2, each.tasks) << what;
    }
  }
  RecordProperty("worst_error_of_step", std::to_string(worst[0]));
  RecordProperty("worst_error_of_a_rate", std::to_string(worst[1]));
}

// The device is busy from pass to pass, each as long as the one before, while what the CPU has to fold piles up.
TEST(Simulator, PassesOfOneLengthNeedNotRepeatEachOther) {
  constexpr int layers = 12;
  const ParameterLayout layout = testing::equal_layers(layers, layer_elements);
  OffloadOptions options;
  options.policy = parse_policy("host");
  options.max_micro_batches = 20;
  const Plan plan = make_plan(layout, options, {std::size_t{1} << 50, 0});
  MachineProfile p = ideal();
  const double pass = layers * 3 * 0.01;
  for (const double fold : {1.02, 1.2, 1.9}) {
    p.host_stream.value = 10.0 * static_cast<double>(layout.state_elements()) / (fold * pass);
    const auto compute = compute_of(layers, 0.01);
    const Simulation each = simulate(layout, plan, p, compute, {.micro_batches = 20, .each_micro_batch = true});
    const Simulation some = simulate(layout, plan, p, compute, {.micro_batches = 20});
    expect_same(some, each, fmt::format("{} of a pass to fold", fold));
  }
}

TEST(Simulator, WhatAnotherPassCosts) {
  const LargeStep many(1, "host", 50, 1);
  const LargeStep more(1, "host", 500, 1);
  EXPECT_EQ(many.simulated({}).tasks, more.simulated({}).tasks);
}

TEST(Simulator, ATraceHasEveryMicroBatch) {
  const LargeStep step(0, "host", 12, 1);
  Trace trace;
  const Simulation traced = step.simulated({.trace = &trace});
  EXPECT_EQ(traced.tasks, step.simulated({.each_micro_batch = true}).tasks);
}

TEST(Simulator, GivesUpOnlyOnWhatTakesLonger) {
  constexpr std::pair<int, int> orders[] = {{1, 1}, {20, 1}, {4, 4}, {8, 2}, {20, 20}};
  for (std::uint64_t seed = 10; seed < 20; ++seed) {
    for (const char* policy : {"host", "stream", "interleave:2"}) {
      const auto& [micro_batches, at_once] = orders[seed % std::size(orders)];
      const LargeStep step(seed, policy, micro_batches, at_once);
      const Simulation whole = step.simulated({});
      const Simulation enough = step.simulated({.give_up_after = 1.000001 * whole.step_seconds});
      EXPECT_FALSE(enough.given_up) << seed << ' ' << policy;
      EXPECT_EQ(enough.step_seconds, whole.step_seconds) << seed << ' ' << policy;
      const Simulation less = step.simulated({.give_up_after = 0.9 * whole.step_seconds});
      EXPECT_TRUE(less.given_up) << seed << ' ' << policy;
      EXPECT_GT(less.step_seconds, 0.9 * whole.step_seconds) << seed << ' ' << policy;
      EXPECT_LE(less.step_seconds, whole.step_seconds) << seed << ' ' << policy;
      EXPECT_LT(less.tasks, whole.tasks + 1) << seed << ' ' << policy;
    }
  }
}

// The one before may have been given up with tasks ready and in flight.
TEST(Simulator, TheMemoryOfAnotherChangesNothing) {
  SimulationMemory memory;
  for (const char* policy : {"host", "stream", "interleave:2"}) {
    const LargeStep step(7, policy, 8, 2);
    const Simulation whole = step.simulated({});
    for (const double share : {0.3, 0.6, 0.9}) {
      EXPECT_TRUE(step.simulated({.give_up_after = share * whole.step_seconds, .memory = &memory}).given_up);
      const Simulation again = step.simulated({.memory = &memory});
      EXPECT_EQ(again.step_seconds, whole.step_seconds) << policy << ' ' << share;
      EXPECT_EQ(again.use, whole.use) << policy << ' ' << share;
      EXPECT_EQ(again.tasks, whole.tasks) << policy << ' ' << share;
    }
  }
}

TEST(Simulator, AHugePlanIsLoweredToAsManyTasksAsItsPieces) {
  const ParameterLayout layout = testing::equal_layers(80, std::int64_t{875'000} * 1024);
  const Plan plan = testing::plan_for(layout, "host", 7000 * 1024);
  ASSERT_EQ(plan.subgroups.size(), 10'000U);
  const Simulation s = simulate(layout, plan, testing::desktop(), compute_of(80, 0.03));
  const std::int64_t pieces_of_subgroup = (7000 * 1024 + plan.piece_elements - 1) / plan.piece_elements;
  EXPECT_GT(s.tasks, 10'000 * (pieces_of_subgroup + 2));  // each piece is sent; norm and update are of a subgroup
  EXPECT_EQ(s.bound_by(), Resource::dram);
}

}  // namespace
}  // namespace tandem
