// The cost model's bytes and seconds are those of its formulas.
#include "scheduler/machine/cost_model.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "scheduler/machine/fair_share.hpp"
#include "scheduler/simulation/simulator.hpp"
#include "tests/scheduler/machines.hpp"

namespace tandem {
namespace {

TEST(CostModel, BytesAreThoseOfTheDesign) {
  const PathSetting resident_weights;
  const PathBytes cpu = path_bytes(UpdatePath::cpu, resident_weights);
  EXPECT_EQ(cpu.dram, 32.0);
  EXPECT_EQ(cpu.to_device, 2.0);
  EXPECT_EQ(cpu.to_host, 2.0);
  const PathBytes streamed = path_bytes(UpdatePath::streamed, resident_weights);
  EXPECT_EQ(streamed.dram, 24.0);
  EXPECT_EQ(streamed.to_device, 12.0);
  EXPECT_EQ(streamed.to_host, 12.0);
  EXPECT_EQ(path_bytes(UpdatePath::resident, resident_weights).dram, 0.0);
  // Weights on the host: 2 more to the host; a gradient that is not kept: 2 more each way.
  const PathBytes far = path_bytes(UpdatePath::streamed, {false, false, 28.0});
  EXPECT_EQ(far.to_host, 16.0);
  EXPECT_EQ(far.to_device, 14.0);
  EXPECT_EQ(far.dram, 30.0);
}

TEST(CostModel, GradientsMoveAsManyBytesAsTheirKernels) {
  MachineProfile machine = testing::desktop();
  machine.device_bandwidth.value = 1.0;  // seconds are bytes
  machine.launch.value = 0.0;
  const CostModel costs(machine, StateFormat::fp32);
  const auto bytes = [&](TaskKind kind, bool in_bf16, bool sums, bool last) {
    Task task;
    task.kind = kind;
    task.end = 1000;
    task.in_bf16 = in_bf16;
    task.last_micro = last;
    return costs.of(task, sums).seconds / 1000.0;
  };
  EXPECT_DOUBLE_EQ(bytes(TaskKind::round_gradient, false, false, true), 6.0);
  EXPECT_DOUBLE_EQ(bytes(TaskKind::keep_gradient, false, false, true), 6.0 + 2.0);  // and the norm
  EXPECT_DOUBLE_EQ(bytes(TaskKind::keep_gradient, true, false, true), 4.0 + 2.0);
  for (const TaskKind kind : {TaskKind::keep_gradient, TaskKind::sum_gradient}) {
    const double norm = kind == TaskKind::keep_gradient ? 2.0 : 0.0;
    EXPECT_DOUBLE_EQ(bytes(kind, false, true, false), 6.0 + 10.0);
    EXPECT_DOUBLE_EQ(bytes(kind, true, true, false), 10.0);
    EXPECT_DOUBLE_EQ(bytes(kind, false, true, true), 6.0 + 10.0 + 6.0 + norm);
    EXPECT_DOUBLE_EQ(bytes(kind, true, true, true), 10.0 + 6.0 + norm);
  }
}

/// A machine on which only DRAM and the link count: as T(c) is derived.
MachineProfile bare(double dram, double link) {
  MachineProfile p = testing::desktop();
  p.dram.value = dram;
  p.to_device.value = p.to_host.value = link;
  p.both_ways.value = 2.0 * link;
  p.cpu_update.value = 1e12;
  p.device_update.value = 1e13;
  return p;
}

TEST(CostModel, SmallerFormatsMoveFewerBytes) {
  const PathBytes split = path_bytes(UpdatePath::streamed, {true, true, 26.0, StateFormat::split});
  EXPECT_EQ(split.to_device, 10.0);
  EXPECT_EQ(split.to_host, 10.0);
  const PathBytes far = path_bytes(UpdatePath::streamed, {false, true, 18.0, StateFormat::bf16_moments});
  EXPECT_EQ(far.to_device, 8.0) << "the weight is half of the master";
  EXPECT_EQ(far.to_host, 8.0);
  EXPECT_EQ(update_bytes_each(StateFormat::fp32), 28.0);
  EXPECT_EQ(update_bytes_each(StateFormat::split), 26.0);
  EXPECT_EQ(update_bytes_each(StateFormat::bf16_moments), 18.0);
  EXPECT_EQ(update_bytes_each(StateFormat::byte_moments), 14.0625) << "a byte of exponent for 64 of either moment";
  EXPECT_EQ(path_bytes(UpdatePath::streamed, {true, true, 14.0, StateFormat::byte_moments}).to_device, 4.03125);
  const PathBytes lion = path_bytes(UpdatePath::streamed, {false, true, 18.0, StateFormat::lion});
  EXPECT_EQ(lion.to_device, 8.0) << "a residual, one moment, and the weight";
  EXPECT_EQ(lion.to_host, 8.0);
  EXPECT_EQ(update_bytes_each(StateFormat::lion), 18.0);
  EXPECT_EQ(state_bytes_each(StateFormat::lion), 6.0);
  EXPECT_EQ(state_bytes_each(StateFormat::lion_fp32_weights), 4.0);
  MachineProfile machine;
  machine.cpu_update.value = 9e8;
  machine.cpu_update_bytes.value = 28.0;
  const MachineProfile smaller = in_format(machine, StateFormat::bf16_moments);
  EXPECT_DOUBLE_EQ(smaller.cpu_update.value, 14e8);
  EXPECT_DOUBLE_EQ(smaller.cpu_update_bytes.value, 18.0);
}

TEST(CostModel, AFewCoresAreShortOfInstructionsBeforeMemoryIs) {
  MachineProfile machine;
  machine.cpu_update.value = 9e8;
  machine.device_update.value = 5e9;
  machine.cpu_update_cores.value = 4.0;
  const auto rates = [&](StateFormat state) {
    const MachineProfile p = in_format(machine, state);
    return std::pair(p.cpu_update.value, p.device_update.value);
  };
  machine.core_bf16_moments.value = 3e8;
  machine.core_byte_moments.value = 4e8;
  machine.device_byte_moments.value = 7e9;
  EXPECT_EQ(rates(StateFormat::bf16_moments), std::pair(12e8, 5e9 * 28.0 / 18.0)) << "four times what a core does";
  EXPECT_EQ(rates(StateFormat::byte_moments).first, 16e8);
  EXPECT_EQ(rates(StateFormat::byte_moments).second, 7e9) << "as measured";
  machine.cpu_update_cores.value = 16.0;
  EXPECT_DOUBLE_EQ(rates(StateFormat::byte_moments).first, 9e8 * 28.0 / 14.0625) << "as many bytes as in fp32";
  EXPECT_EQ(rates(StateFormat::split).first, 9e8 / (26.0 / 28.0));
  EXPECT_EQ(rates(StateFormat::lion), std::pair(9e8 / (18.0 / 28.0), 5e9 / (18.0 / 28.0)))
      << "not measured: as many bytes as in fp32";
}

TEST(CostModel, DevicesOfOneHostHaveEqualPartsOfItsCores) {
  MachineProfile machine = bare(1e15, 1e12);
  machine.task_overhead.value = 0.0;
  machine.copy_cores.value = 4.0;
  machine.device_threads.value = 4.0;
  ASSERT_EQ(machine.cores.value, 16.0);
  Task update{.kind = TaskKind::update_cpu, .lane = Lane::cpu};
  update.end = 1'000'000;
  const Task gather{.kind = TaskKind::gather_weights, .lane = Lane::peers, .bytes = std::uint64_t{1} << 40};
  const auto cost = [&](double devices, int threads, const Task& task) {
    machine.devices.value = devices;
    return CostModel(machine, StateFormat::fp32, threads).of(task, false);
  };
  const auto cores_of = [](const TaskCost& of) { return of.share[static_cast<std::size_t>(Resource::cores)]; };
  EXPECT_DOUBLE_EQ(cost(2, 4, update).seconds, cost(1, 4, update).seconds) << "8 threads on 16 cores";
  EXPECT_DOUBLE_EQ(cost(2, 16, update).seconds, 2.0 * cost(1, 16, update).seconds) << "32 threads";
  EXPECT_DOUBLE_EQ(cores_of(cost(2, 4, update)), 0.5);
  EXPECT_NEAR(cores_of(cost(2, 4, gather)), 0.5, 0.05) << "4 of 8 cores carry what this device gets";
  machine.devices.value = 2;
  EXPECT_DOUBLE_EQ(CostModel(machine, StateFormat::fp32).device_core_share(), 0.5) << "its 4 threads, of 8 cores";
}

TEST(CostModel, UpdateSecondsAreTheMaximumOfBothLines) {
  const double b = 60e9;
  const double p = 20e9;
  const double a = 32.0;
  const double s = 12.0;
  for (double c = 0.0; c <= 1.0; c += 0.125) {
    const double expected = std::max((2 * s + (a - 2 * s) * c) / b, (s - (s - 2) * c) / p);
    EXPECT_NEAR(update_seconds(bare(b, p), {}, 1.0, c), expected, 1e-12 * expected) << c;
  }
}

TEST(CostModel, ACopiedByteCountsForWhatItCosts) {
  MachineProfile p = bare(1.0, 1e12);  // seconds are bytes of DRAM
  p.copy_dram.value = 1.5;
  EXPECT_DOUBLE_EQ(update_seconds(p, {}, 1.0, 0.0), 24.0 * 1.5);
  EXPECT_DOUBLE_EQ(update_seconds(p, {}, 1.0, 1.0), 28.0 + 4.0 * 1.5);
}

TEST(CostModel, AllStreamedWinsBelowTwiceTheLinkAndAllCpuAboveSixteenTimes) {
  const double link = 20e9;
  EXPECT_EQ(best_cpu_share(bare(1.9 * link, link), {}), 0.0);
  EXPECT_EQ(best_cpu_share(bare(16.1 * link, link), {}), 1.0);
  const double mixed = best_cpu_share(bare(5.0 * link, link), {});
  EXPECT_GT(mixed, 0.0);
  EXPECT_LT(mixed, 1.0);
}

TEST(CostModel, TheBestShareIsBest) {
  std::mt19937_64 random(7);
  std::uniform_real_distribution<double> rate(1e9, 300e9);
  for (int i = 0; i < 200; ++i) {
    MachineProfile p = bare(rate(random), rate(random) / 5.0);
    p.cpu_update.value = rate(random) / 28.0;
    const double best = best_cpu_share(p, {});
    for (double c = 0.0; c <= 1.0; c += 0.01) {
      EXPECT_LE(update_seconds(p, {}, 1.0, best), update_seconds(p, {}, 1.0, c) * (1 + 1e-12));
    }
  }
}

TEST(CostModel, PublishedStrideIsItsFormula) {
  // b = 12, Ug = 24, Uc = 2, Dc = 4 (any unit): 1 + (1/4 + 1/24) / (1/2 + 1/4 - 1/24).
  EXPECT_NEAR(published_stride(12, 24, 2, 4), 1.0 + (7.0 / 24.0) / (17.0 / 24.0), 1e-15);
  EXPECT_TRUE(std::isinf(published_stride(1, 24, 1e9, 1e9)));
}

TaskCost cost_of(std::initializer_list<std::pair<Resource, double>> shares) {
  TaskCost cost;
  cost.seconds = 1.0;
  for (const auto& [resource, share] : shares) cost.share[static_cast<std::size_t>(resource)] = share;
  return cost;
}

TEST(FairShare, AloneRunsAtFullSpeedAndEqualsAreSlowedEqually) {
  const TaskCost a = cost_of({{Resource::dram, 0.8}});
  const TaskCost b = cost_of({{Resource::dram, 0.8}, {Resource::to_device, 1.0}});
  std::array<double, 2> speeds{};
  const std::array<const TaskCost*, 2> both{&a, &b};
  fair_speeds(std::span(both).first(1), std::span(speeds).first(1));
  EXPECT_EQ(speeds[0], 1.0);
  fair_speeds(both, speeds);
  EXPECT_DOUBLE_EQ(speeds[0], 0.625);
  EXPECT_DOUBLE_EQ(speeds[1], 0.625);
}

TEST(FairShare, NothingIsOverfullAndNobodyIsHeldBackWithoutAFullResource) {
  std::mt19937_64 random(3);
  std::uniform_real_distribution<double> share(0.0, 1.0);
  for (int round = 0; round < 2000; ++round) {
    std::array<TaskCost, 5> costs;
    std::array<const TaskCost*, 5> pointers{};
    for (std::size_t i = 0; i < costs.size(); ++i) {
      for (double& s : costs[i].share) s = share(random) < 0.5 ? 0.0 : share(random);
      pointers[i] = &costs[i];
    }
    std::array<double, 5> speeds{};
    fair_speeds(pointers, speeds);
    ResourceShares used{};
    for (std::size_t i = 0; i < costs.size(); ++i) {
      for (std::size_t r = 0; r < used.size(); ++r) used[r] += speeds[i] * costs[i].share[r];
    }
    for (const double u : used) EXPECT_LE(u, 1.0 + 1e-12);
    for (std::size_t i = 0; i < costs.size(); ++i) {
      // Max-min: whoever is slowed uses a full resource, on which nobody is faster.
      bool justified = speeds[i] >= 1.0 - 1e-12;
      for (std::size_t r = 0; r < used.size() && !justified; ++r) {
        if (costs[i].share[r] <= 0.0 || used[r] < 1.0 - 1e-9) continue;
        justified = true;
        for (std::size_t j = 0; j < costs.size(); ++j) {
          justified = justified && (costs[j].share[r] <= 0.0 || speeds[j] <= speeds[i] + 1e-9);
        }
      }
      EXPECT_TRUE(justified) << "round " << round << " task " << i;
    }
  }
}

}  // namespace
}  // namespace tandem
