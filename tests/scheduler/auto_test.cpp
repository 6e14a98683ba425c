// The plan that `auto` finds is close to the best of all, and never slower than a fixed policy.
#include "scheduler/search/auto.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <utility>

#include "core/base/error.hpp"
#include "scheduler/search/upgrades.hpp"
#include "tests/scheduler/machines.hpp"

namespace tandem {
namespace {

/// A small case: a few subgroups on a random machine.
struct Case {
  ParameterLayout layout;
  OffloadOptions options;
  PlanningFacts facts;
  MachineProfile machine;
  std::vector<LayerSeconds> compute;
};

Case random_case(std::uint64_t seed, int most_subgroups, int fewest_subgroups = 1) {
  std::mt19937_64 random(seed);
  Case c;
  const int layers = std::uniform_int_distribution<int>(fewest_subgroups, most_subgroups)(random);
  const std::int64_t elements = 1024 * std::uniform_int_distribution<std::int64_t>(256, 4096)(random);
  c.layout = testing::equal_layers(layers, elements);
  c.options.policy = parse_policy("auto");
  c.options.subgroup_size = elements;
  c.machine = testing::random_machine(random);
  OffloadOptions smallest = c.options;
  smallest.policy = parse_policy("host");
  const auto least = static_cast<double>(smallest_device_memory(c.layout, smallest));
  const auto all = static_cast<double>(c.layout.state_elements()) * 20.0;
  c.facts.device_capacity =
      static_cast<std::size_t>(least * 1.3 + all * std::uniform_real_distribution<double>(0.0, 1.0)(random));
  const double update = static_cast<double>(elements) / c.machine.cpu_update.value;
  const double seconds = update * testing::spread(random, 0.05, 2.0);
  c.compute.assign(static_cast<std::size_t>(layers), {seconds / 3.0, seconds * 2.0 / 3.0});
  return c;
}

double best_of_all(const Case& c, std::size_t subgroups) {
  double best = std::numeric_limits<double>::infinity();
  const auto combinations = static_cast<int>(std::lround(std::pow(3.0, static_cast<double>(subgroups))));
  for (int code = 0; code < combinations; ++code) {
    OffloadOptions options = c.options;
    options.policy = parse_policy("static:0");
    int rest = code;
    std::vector<UpdatePath>& paths = options.paths.emplace();
    for (std::size_t i = 0; i < subgroups; ++i, rest /= 3) paths.push_back(static_cast<UpdatePath>(rest % 3));
    try {
      const Plan plan = make_plan(c.layout, options, c.facts);
      best = std::min(best, simulate(c.layout, plan, c.machine, c.compute).step_seconds);
    } catch (const PlanError&) {
      continue;
    }
  }
  return best;
}

/// How many random machines are searched: a few, as all take a minute or more, and with TANDEM_MANY_SEARCHES many.
std::uint64_t searched(std::uint64_t few, std::uint64_t many) {
  return std::getenv("TANDEM_MANY_SEARCHES") == nullptr ? few : many;
}

Choice choice_of(const Case& c) { return choose_plan(c.layout, c.options, c.facts, c.machine, c.compute); }

/// The case of a seed, of at most twelve subgroups, and its choice: found once, as a search takes a second.
struct Chosen {
  Case c;
  Choice choice;
};
const Chosen& chosen_of_twelve(std::uint64_t seed) {
  static std::map<std::uint64_t, Chosen> found;
  auto at = found.find(seed);
  if (at == found.end()) {
    Case c = random_case(seed, 12);
    Choice choice = choice_of(c);
    at = found.emplace(seed, Chosen{std::move(c), std::move(choice)}).first;
  }
  return at->second;
}

Case with_more_cores(Case c) {
  for (Figure* f : {&c.machine.cores, &c.machine.cpu_update}) f->value *= 1.5;
  return c;
}

TEST(Auto, IsCloseToTheBestOfAllDivisions) {
  double worst = 0.0;
  for (std::uint64_t seed = 0; seed < searched(40, 500); ++seed) {
    const Case c = random_case(seed, 6);
    const Choice choice = choice_of(c);
    const double best = best_of_all(c, choice.plan.subgroups.size());
    worst = std::max(worst, choice.simulation.step_seconds / best);
    EXPECT_LE(choice.simulation.step_seconds, 1.03 * best) << "seed " << seed;
  }
  RecordProperty("worst_over_best", std::to_string(worst));
}

TEST(Auto, IsNeverPredictedSlowerThanAFixedPolicy) {
  for (std::uint64_t seed = 1000; seed < 1050; ++seed) {
    const Choice& choice = chosen_of_twelve(seed).choice;
    for (const Candidate& candidate : choice.candidates) {
      if (candidate.fits) {
        EXPECT_LE(choice.simulation.step_seconds, candidate.simulation.step_seconds) << seed;
      }
    }
  }
}

/// Half as much again of each, alone. A fixed plan may lose: what a resource does faster takes more of a full DRAM.
TEST(Auto, MoreOfAnythingIsNeverSlower) {
  const auto expect_no_slower = [](const Case& wider, double before, std::uint64_t seed, const char* what) {
    EXPECT_LE(choice_of(wider).simulation.step_seconds, 1.01 * before) << "seed " << seed << ", " << what;
  };
  // Seeds of cases that more cores made slower while updates took all of them.
  for (const std::uint64_t seed : {2047U, 2065U, 2079U, 2095U}) {
    const Case c = random_case(seed, 40, 24);
    expect_no_slower(with_more_cores(c), choice_of(c).simulation.step_seconds, seed, "cores");
  }
  for (std::uint64_t seed = 2000; seed < 2000 + searched(1, 15); ++seed) {
    const Case c = random_case(seed, 40, 24);
    const double before = choice_of(c).simulation.step_seconds;
    expect_no_slower(with_more_cores(c), before, seed, "cores");
    Case wider = c;
    wider.facts.device_capacity += wider.facts.device_capacity / 2;
    expect_no_slower(wider, before, seed, "memory");
    wider = c;
    wider.machine.dram.value *= 1.5;
    expect_no_slower(wider, before, seed, "DRAM bandwidth");
    wider = c;
    for (Figure* f : {&wider.machine.to_device, &wider.machine.to_host, &wider.machine.both_ways}) f->value *= 1.5;
    expect_no_slower(wider, before, seed, "link");
  }
}

// With them all, the next forward waits for copies that find DRAM full.
TEST(Auto, UpdatesOnFewerThreadsWhereThatIsFaster) {
  Case c = with_more_cores(random_case(2047, 40, 24));
  const Choice choice = choice_of(c);
  EXPECT_GT(choice.plan.update_threads, 0);
  EXPECT_LT(choice.plan.update_threads, 16);
  Plan on_all = choice.plan;
  on_all.update_threads = 0;
  EXPECT_GT(simulate(c.layout, on_all, c.machine, c.compute).step_seconds, 1.01 * choice.simulation.step_seconds);
  c.options.update_threads = 15;
  EXPECT_EQ(choice_of(c).plan.update_threads, 15) << "the caller's";
}

// A plan chosen for the machine as it is also fits a larger device, and is as fast there.
TEST(Auto, AnUpgradeOfMemoryIsNeverPredictedSlower) {
  for (std::uint64_t seed = 2100; seed < 2100 + searched(1, 10); ++seed) {
    const Case c = random_case(seed, 24, 12);
    const Choice choice = choice_of(c);
    const auto list = upgrades(c.layout, c.options, c.facts, c.machine, c.compute, choice.plan);
    const auto memory =
        std::find_if(list.begin(), list.end(), [](const Upgrade& u) { return u.what == "twice the device memory"; });
    ASSERT_NE(memory, list.end());
    EXPECT_LE(memory->step_seconds, choice.simulation.step_seconds) << seed;
  }
}

MachineProfile shipped(const std::string& name) {
  return read_profile(std::string(TANDEM_SOURCE_DIR "/profiles/") + name + ".toml");
}

/// A large model's state that does not fit, on a machine of the given kind.
Plan::Shares shares_on(const MachineProfile& machine) {
  const ParameterLayout layout = testing::equal_layers(32, std::int64_t{64} << 20);
  OffloadOptions options;
  options.policy = parse_policy("auto");
  options.subgroup_size = std::int64_t{64} << 20;
  const PlanningFacts facts{std::size_t{9} << 30, 0};
  const auto compute = compute_seconds(machine, matrix_work(layout, 2048));
  return choose_plan(layout, options, facts, machine, compute).plan.shares();
}

TEST(Auto, PicksTheDeviceWhereDramIsScarceAndTheCpuWhereTheLinkIs) {
  const Plan::Shares starved = shares_on(shipped("dram-starved"));
  EXPECT_GT(starved.streamed + starved.resident, starved.cpu);
  MachineProfile narrow = shipped("80gb-pcie4");
  for (Figure* f : {&narrow.to_device, &narrow.to_host, &narrow.both_ways}) f->value /= 10.0;
  const Plan::Shares linked = shares_on(narrow);
  EXPECT_GT(linked.cpu, linked.streamed);
}

// Beyond 48 subgroups no single one is changed. A ceiling above which all state fits on the device, and most weights no
// longer do, has been a trap: the fastest fixed policy keeps all state there, and a good division does not.
TEST(Auto, MoreMemoryIsNeverSlowerWhereThereAreManySubgroups) {
  ParameterLayout layout;  // layers of gpt2-large
  layout.add_layer("embedding").add("w", {50257, 1280});
  for (int i = 0; i < 36; ++i) layout.add_layer("h." + std::to_string(i)).add("w", {12 * 1280, 1280});
  const MachineProfile machine = shipped("16gb-pcie4");
  const auto compute = compute_seconds(machine, matrix_work(layout, 512));
  OffloadOptions options;
  options.policy = parse_policy("auto");
  options.reserved_device_memory = std::size_t{700} << 20;
  double before = std::numeric_limits<double>::infinity();
  for (std::size_t mib = 11500; mib <= 13500; mib += 250) {
    const Choice choice = choose_plan(layout, options, {mib << 20, 0}, machine, compute);
    ASSERT_GT(choice.plan.subgroups.size(), 48U);
    EXPECT_LE(choice.simulation.step_seconds, 1.01 * before) << mib << " MiB";
    before = std::min(before, choice.simulation.step_seconds);
  }
}

// The search simulates so large a step coarsened; the promise holds piece by piece.
TEST(Auto, IsNeverPredictedSlowerThanAFixedPolicyOfManySubgroups) {
  const ParameterLayout layout = testing::equal_layers(28, std::int64_t{260} << 20);
  const PlanningFacts facts{std::size_t{16} << 30, 0};
  for (const char* const name : {"24gb-pcie4", "80gb-pcie4", "gh200-coherent"}) {
    const MachineProfile machine = shipped(name);
    const auto compute = compute_seconds(machine, matrix_work(layout, 2048));
    for (const auto& [micro_batches, at_once] : {std::pair{1, 1}, std::pair{8, 1}, std::pair{8, 8}}) {
      OffloadOptions options;
      options.policy = parse_policy("auto");
      options.max_micro_batches = micro_batches;
      options.micro_batches_at_once = at_once;
      const double chosen = choose_plan(layout, options, facts, machine, compute).simulation.step_seconds;
      for (const char* const policy : {"host", "stream", "static:0", "interleave:2", "interleave:3", "interleave:5",
                                       "interleave:2,resident=0.1", "static:0.9"}) {
        OffloadOptions fixed = options;
        fixed.policy = parse_policy(policy);
        try {
          const Plan plan = make_plan(layout, fixed, facts);
          const Simulation s = simulate(layout, plan, machine, compute, {.micro_batches = micro_batches});
          EXPECT_LE(chosen, s.step_seconds) << name << ' ' << micro_batches << ' ' << at_once << ' ' << policy;
        } catch (const PlanError&) {  // it does not fit
        }
      }
    }
  }
}

// Cost of planning, counted in tasks: a 7B model with 1, 8 and 64 micro-batches a step, in either order.
TEST(Auto, AccumulationHardlyRaisesWhatPlanningCosts) {
  const ParameterLayout layout = testing::equal_layers(28, std::int64_t{260} << 20);
  // The model computes so much that transfers decide, and few policies come near the best.
  MachineProfile machine = shipped("24gb-pcie4");
  machine.matmul.value = 165e12;
  machine.attention.value = 99e12;
  auto compute = compute_seconds(machine, matrix_work(layout, 2048));
  const auto tasks = [&](int micro_batches, int at_once) {
    OffloadOptions options;
    options.policy = parse_policy("auto");
    options.max_micro_batches = micro_batches;
    options.micro_batches_at_once = at_once;
    const Choice choice = choose_plan(layout, options, {std::size_t{16} << 30, 0}, machine, compute);
    EXPECT_LT(choice.simulations, 700) << micro_batches << ' ' << at_once;
    return choice.simulated_tasks;
  };
  const std::int64_t alone = tasks(1, 1);
  EXPECT_LT(alone, 2'200'000);
  for (const auto& [micro_batches, at_once] : {std::pair{8, 1}, {8, 4}, {8, 8}, {64, 1}, {64, 64}}) {
    EXPECT_LT(tasks(micro_batches, at_once), 3 * alone) << micro_batches << ' ' << at_once;
  }
  // When computing is most of a step, many policies come near the best, and are compared piece by piece: for eight
  // million tasks at most.
  machine = shipped("24gb-pcie4");
  compute = compute_seconds(machine, matrix_work(layout, 2048));
  EXPECT_LT(tasks(64, 1), alone + 8'000'000);
}

// A plan is named by a fixed policy only where that policy divides so.
TEST(Auto, SaysWhichPolicyItsPlanIs) {
  int improved = 0;
  for (std::uint64_t seed = 1000; seed < 1030; ++seed) {
    const auto& [c, choice] = chosen_of_twelve(seed);
    EXPECT_TRUE(choice.plan.chosen_by_auto);
    EXPECT_EQ(choice.candidates.front().policy, choice.plan.policy) << seed;
    EXPECT_EQ(choice.candidates.front().improved, choice.plan.policy.kind == Policy::Kind::automatic) << seed;
    if (choice.candidates.front().improved) {
      EXPECT_EQ(choice.plan.policy_text(), "auto");
      ++improved;
      continue;
    }
    EXPECT_EQ(choice.plan.policy_text(), choice.plan.policy.text() + ", auto");
    OffloadOptions named = c.options;
    named.policy = choice.plan.policy;
    const Plan again = make_plan(c.layout, named, c.facts);
    for (std::size_t i = 0; i < again.subgroups.size(); ++i) {
      EXPECT_EQ(again.subgroups[i].path(), choice.plan.subgroups[i].path()) << seed;
    }
  }
  EXPECT_GT(improved, 5);
  EXPECT_LT(improved, 30);
}

TEST(Auto, AFixedPolicyIsItsOnlyCandidate) {
  Case c = random_case(7, 6);
  c.options.policy = parse_policy("host");
  const Choice choice = choice_of(c);
  ASSERT_EQ(choice.candidates.size(), 1U);
  EXPECT_EQ(choice.plan.policy.kind, Policy::Kind::host);
  EXPECT_FALSE(choice.plan.chosen_by_auto);
}

TEST(Auto, WhatDoesNotFitIsRefusedAsByMakePlan) {
  Case c = random_case(7, 6);
  c.facts.device_capacity = 1024;
  EXPECT_THROW(choice_of(c), PlanError);
}

}  // namespace
}  // namespace tandem
