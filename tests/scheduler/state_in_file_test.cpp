// State that host memory has no room for: how much of it goes to a file, which, and what that costs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <vector>

#include "core/base/error.hpp"
#include "scheduler/search/auto.hpp"
#include "scheduler/simulation/coarsening.hpp"
#include "scheduler/simulation/simulator.hpp"
#include "tests/scheduler/in_file.hpp"
#include "tests/scheduler/machines.hpp"

namespace tandem {
namespace {

using namespace literals;  // NOLINT: sizes
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::ThrowsMessage;

constexpr PlanningFacts roomy{64_GiB, 0};

ParameterLayout layout_of_layers() { return testing::equal_layers(8, std::int64_t{16} << 20); }

OffloadOptions with_folder(const std::string& policy, StateFormat state = StateFormat::fp32) {
  OffloadOptions options;
  options.policy = parse_policy(policy);
  options.state = state;
  options.subgroup_size = std::int64_t{1} << 20;
  options.state_folder = "/fast";
  // Memory for taking updates back is used only where there is room, and has tests of its own.
  options.speculate = Speculate::off;
  return options;
}

std::size_t largest_booked(const Plan& plan) {
  std::size_t largest = 0;
  for (const Subgroup& s : plan.subgroups) largest = std::max(largest, booked_state_bytes(s.count(), plan.state));
  return largest;
}

TEST(StateInAFile, IsAsLittleAsTheCeilingAsksFor) {
  const ParameterLayout layout = layout_of_layers();
  for (const char* policy : {"host", "stream", "static:0.5", "interleave:3,resident=0.2", "auto"}) {
    for (const StateFormat state : state_formats) {
      OffloadOptions options = with_folder(policy, state);
      const std::size_t all = make_plan(layout, options, roomy).memory.host_bytes();
      options.host_memory = all;
      EXPECT_EQ(testing::parameters_in_file(make_plan(layout, options, roomy)), 0);
      int plans = 0;
      for (std::size_t ceiling = all - all / 50; ceiling > all / 4; ceiling -= all / 10) {
        options.host_memory = ceiling;
        const std::optional<Plan> plan = find_plan(layout, options, roomy);
        if (!plan) break;  // weights and gradients alone are more
        ++plans;
        const std::size_t host = plan->memory.host_bytes();
        EXPECT_LE(host, ceiling);
        EXPECT_GT(host + largest_booked(*plan), ceiling) << policy << ": one less would do";
        EXPECT_EQ(plan->memory.bytes_in(Place::file), plan->file_bytes_of_step());
        EXPECT_GT(plan->file_buffers, 0);
      }
      EXPECT_GE(plans, policy == std::string("auto") ? 0 : 1) << policy;
    }
  }
}

TEST(StateInAFile, IsSpreadEvenlyOverTheModel) {
  OffloadOptions options = with_folder("host");
  options.host_memory = make_plan(layout_of_layers(), options, roomy).memory.host_bytes() * 3 / 4;
  const Plan plan = make_plan(layout_of_layers(), options, roomy);
  const double share = static_cast<double>(testing::parameters_in_file(plan)) / static_cast<double>(plan.shares().cpu);
  EXPECT_GT(share, 0.3);
  EXPECT_LT(share, 0.5);
  double in_file = 0.0;
  double passed = 0.0;
  for (const Subgroup& s : plan.subgroups) {
    in_file += s.tier == Tier::file ? 1.0 : 0.0;
    passed += 1.0;
    EXPECT_NEAR(in_file, share * passed, 1.0);
  }
}

TEST(StateInAFile, IsRefusedWhereItsDiskOrTheRestOfMemoryIsTooSmall) {
  OffloadOptions options = with_folder("host");
  const ParameterLayout layout = layout_of_layers();
  const std::size_t all = make_plan(layout, options, roomy).memory.host_bytes();
  options.host_memory = all * 3 / 4;
  const std::size_t needed = make_plan(layout, options, roomy).file_bytes_of_step();
  PlanningFacts facts = roomy;
  facts.file_room = needed;
  EXPECT_TRUE(find_plan(layout, options, facts));
  --facts.file_room;
  EXPECT_FALSE(find_plan(layout, options, facts));
  EXPECT_THAT([&] { make_plan(layout, options, facts); },
              ThrowsMessage<PlanError>(AllOf(HasSubstr("does not fit in /fast"), HasSubstr("try --"))));
  options.host_memory = all / 20;
  EXPECT_THAT([&] { make_plan(layout, options, roomy); },
              ThrowsMessage<PlanError>(HasSubstr("does not fit in host memory")));
}

TEST(StateInAFile, IsAdvisedWhereMemoryIsTooSmall) {
  OffloadOptions options = with_folder("host");
  const ParameterLayout layout = layout_of_layers();
  options.host_memory = make_plan(layout, options, roomy).memory.host_bytes() * 3 / 4;
  const Plan with_file = make_plan(layout, options, roomy);
  options.state_folder.reset();
  const std::string flag = "--state-dir DIR on a fast disk, for " + format_bytes(with_file.file_bytes_of_step());
  EXPECT_THAT([&] { make_plan(layout, options, roomy); }, ThrowsMessage<PlanError>(HasSubstr(flag)));
  *options.host_memory /= 20;
  EXPECT_THAT([&] { make_plan(layout, options, roomy); }, ThrowsMessage<PlanError>(Not(HasSubstr("--state-dir"))));
}

TEST(StateInAFile, IsInTableAndJson) {
  OffloadOptions options = with_folder("host");
  options.host_memory = make_plan(layout_of_layers(), options, roomy).memory.host_bytes() * 3 / 4;
  const Plan plan = make_plan(layout_of_layers(), options, roomy);
  EXPECT_THAT(plan.table(), HasSubstr("in a file: " + format_bytes(plan.file_bytes_of_step())));
  const nlohmann::json json = nlohmann::json::parse(plan.json());
  EXPECT_EQ(json["file_buffers"], plan.file_buffers);
  const auto in_file = std::count_if(json["subgroups"].begin(), json["subgroups"].end(),
                                     [](const auto& s) { return s["tier"] == "file"; });
  EXPECT_EQ(in_file * (std::int64_t{1} << 20), testing::parameters_in_file(plan));
}

// -- what it costs -------------------------------------------------------------------------------------------

/// No overheads, and all but the file so fast that it alone counts.
MachineProfile file_bound(double read, double write, double both) {
  MachineProfile p = testing::desktop();
  p.dram.value = p.host_stream.value = p.device_bandwidth.value = 1e14;
  p.device_update.value = p.cpu_update.value = 1e13;
  p.to_device.value = p.to_host.value = 1e12;
  p.both_ways.value = 2e12;
  p.file_read = testing::assumed(read);
  p.file_write = testing::assumed(write);
  p.file_both_ways = testing::assumed(both);
  return p;
}

std::vector<LayerSeconds> short_compute() { return std::vector<LayerSeconds>(8, {1e-4, 2e-4}); }

/// Half of what is on the host, or all.
Plan plan_in_file(const std::string& policy, int every) {
  OffloadOptions options = with_folder(policy);
  Plan plan = make_plan(layout_of_layers(), options, roomy);
  int index = 0;
  for (Subgroup& s : plan.subgroups) {
    if (s.tier == Tier::host && ++index % every == 0) s.tier = Tier::file;
  }
  plan.file_buffers = 6;
  return plan;
}

TEST(StateInAFile, TakesAsLongAsItIsReadAndWritten) {
  const ParameterLayout layout = layout_of_layers();
  for (const char* policy : {"host", "stream"}) {
    for (const int every : {1, 2}) {
      const Plan plan = plan_in_file(policy, every);
      const auto bytes = static_cast<double>(plan.file_bytes_of_step());
      const auto seconds = [&](double read, double write, double both) {
        const Simulation s = simulate(layout, plan, file_bound(read, write, both), short_compute());
        EXPECT_EQ(s.bound_by(), Resource::file);
        return s.step_seconds;
      };
      // A disk that reads and writes at once, each at its rate; then one that shares a rate between both; then one that
      // does one after the other.
      EXPECT_NEAR(seconds(4e9, 8e9, 12e9), bytes / 4e9, 0.05 * bytes / 4e9) << policy;
      EXPECT_NEAR(seconds(8e9, 4e9, 12e9), bytes / 4e9, 0.05 * bytes / 4e9) << policy;
      EXPECT_NEAR(seconds(4e9, 4e9, 4e9), 2 * bytes / 4e9, 0.05 * 2 * bytes / 4e9) << policy;
    }
  }
}

TEST(StateInAFile, CoarsenedTakesAsLong) {
  const ParameterLayout layout = layout_of_layers();
  const std::vector<LayerSeconds> compute(8, {0.02, 0.04});
  for (const char* policy : {"host", "stream", "interleave:2"}) {
    for (const double rate : {2e9, 20e9}) {
      const MachineProfile machine = file_bound(rate, rate, 1.5 * rate);
      const Plan plan = plan_in_file(policy, 2);
      const double exact = simulate(layout, plan, machine, compute).step_seconds;
      EXPECT_NEAR(simulate(layout, plan, machine, compute, {.coarse_pieces = 40}).step_seconds, exact, 0.1 * exact)
          << policy;
    }
  }
}

TEST(StateInAFile, CoarsenedIsAsMuch) {
  for (const int every : {1, 2, 3}) {
    const Plan plan = plan_in_file("host", every);
    const Plan coarse_pieces = coarsened(layout_of_layers(), plan, 40);
    EXPECT_LT(coarse_pieces.subgroups.size(), plan.subgroups.size());
    EXPECT_EQ(testing::parameters_in_file(coarse_pieces), testing::parameters_in_file(plan));
  }
}

TEST(StateInAFile, IsNotSimulatedWhereNobodyKnowsTheFile) {
  MachineProfile machine = file_bound(1e9, 1e9, 1e9);
  EXPECT_TRUE(machine.knows_file());
  machine.file_read = {};
  EXPECT_FALSE(machine.knows_file());
  EXPECT_THROW(simulate(layout_of_layers(), plan_in_file("host", 2), machine, short_compute()), MisuseError);
}

// The device's memory is used for state before a slow file is.
TEST(StateInAFile, IsLessWhereTheDeviceHoldsSome) {
  const ParameterLayout layout = layout_of_layers();
  OffloadOptions options = with_folder("host");
  const std::size_t all = make_plan(layout, options, roomy).memory.host_bytes();
  options.host_memory = all / 2;
  options.device_memory = 1_GiB + 512_MiB;
  const Plan host = make_plan(layout, options, roomy);
  options.policy = parse_policy("auto");
  const Choice choice = choose_plan(layout, options, roomy, file_bound(1e9, 1e9, 1.5e9), short_compute());
  EXPECT_LT(testing::parameters_in_file(choice.plan), testing::parameters_in_file(host));
  EXPECT_LE(choice.plan.memory.host_bytes(), options.host_memory);
  const double of_host = simulate(layout, host, file_bound(1e9, 1e9, 1.5e9), short_compute()).step_seconds;
  EXPECT_LT(choice.simulation.step_seconds, of_host);
}

}  // namespace
}  // namespace tandem
