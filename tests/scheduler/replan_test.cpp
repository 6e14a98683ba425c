// A run that is not as fast as predicted gets another plan, once, and within what is booked.
#include "scheduler/search/replan.hpp"

#include <gtest/gtest.h>

#include "tests/scheduler/machines.hpp"

namespace tandem {
namespace {

/// A model whose update is divided between CPU and link; compute hides little of it.
struct PlannedRun {
  ParameterLayout layout = testing::equal_layers(12, 1024 * 2048);
  OffloadOptions options;
  PlanningFacts facts;
  MachineProfile machine = testing::desktop();
  std::vector<LayerSeconds> compute{12, {2e-3, 4e-3}};
  Choice choice;
  Plan plan;

  explicit PlannedRun(double cpu_rate = 1.0) {
    machine.cpu_update.value *= cpu_rate;
    options.policy = parse_policy("auto");
    options.subgroup_size = 1024 * 1024;
    OffloadOptions host = options;
    host.policy = parse_policy("host");
    facts.device_capacity = 3 * smallest_device_memory(layout, host);
    choice = choose_plan(layout, options, facts, machine, compute);
    plan = choice.plan;
    book_room_for_change(plan, layout, options, facts);
  }

  Replanner replanner() const {
    return {layout, options, facts, machine, compute, plan, choice.simulation, {.window = 3}};
  }
};

/// The first change that steps with these rates bring, of at most `steps`.
std::optional<Replanner::Change> after(Replanner& replanner, const StepRates& rates, int steps) {
  for (int i = 0; i < steps; ++i) {
    if (auto change = replanner.after_step(rates)) return change;
  }
  return std::nullopt;
}

TEST(Replan, StaysWhereAllGoesAsPredicted) {
  const PlannedRun run;
  Replanner replanner = run.replanner();
  StepRates rates = run.choice.simulation.rates;
  ASSERT_GT(rates.compute_seconds, 0.0);
  ASSERT_GT(rates.to_device, 0.0);
  ASSERT_GT(rates.cpu_update, 0.0);
  EXPECT_FALSE(after(replanner, rates, 20));
  rates.cpu_update /= 1.2;
  rates.to_device *= 1.2;
  EXPECT_FALSE(after(replanner, rates, 20)) << "within the band";
}

TEST(Replan, MovesWorkFromAProcessorThatIsSlowerThanThought) {
  const PlannedRun run;
  Replanner replanner = run.replanner();
  StepRates rates = run.choice.simulation.rates;
  rates.cpu_update /= 8.0;
  const auto change = after(replanner, rates, 6);
  ASSERT_TRUE(change);
  EXPECT_LT(change->plan.shares().cpu, run.plan.shares().cpu);
  EXPECT_LT(change->seconds_after, 0.9 * change->seconds_before);
  EXPECT_LE(change->plan.memory.device_bytes(), run.plan.memory.device_bytes());
  EXPECT_LE(change->plan.memory.host_bytes(), run.plan.memory.host_bytes());
  EXPECT_NEAR(replanner.profile().cpu_update.value, run.machine.cpu_update.value / 8.0,
              1e-9 * run.machine.cpu_update.value);
  // Held against the corrected model, the same machine gives no reason for another change.
  const Simulation corrected = simulate(run.layout, change->plan, replanner.profile(), run.compute, {});
  EXPECT_FALSE(after(replanner, corrected.rates, 30));
}

TEST(Replan, MovesWorkFromALinkThatIsSlowerThanThought) {
  const PlannedRun run(0.15);
  ASSERT_GT(run.plan.shares().streamed, 0);
  Replanner replanner = run.replanner();
  StepRates rates = run.choice.simulation.rates;
  rates.to_device /= 8.0;
  rates.to_host /= 8.0;
  const auto change = after(replanner, rates, 6);
  ASSERT_TRUE(change);
  EXPECT_LT(change->plan.shares().streamed, run.plan.shares().streamed);
}

// Steps whose updates ran otherwise than predicted have no rate of the CPU.
TEST(Replan, LooksAtTheStepsThatTellARateAlone) {
  const PlannedRun run;
  StepRates silent = run.choice.simulation.rates;
  silent.cpu_update = 0.0;
  StepRates slow = run.choice.simulation.rates;
  slow.cpu_update /= 8.0;
  Replanner unmoved = run.replanner();
  EXPECT_FALSE(after(unmoved, silent, 20));
  Replanner moved = run.replanner();
  EXPECT_FALSE(after(moved, silent, 5));
  EXPECT_TRUE(after(moved, slow, 1)) << "the only one of its window that tells";
}

TEST(Replan, IsNotMovedByOneStepOrBeforeItIsWarm) {
  const PlannedRun run;
  Replanner replanner = run.replanner();
  StepRates slow = run.choice.simulation.rates;
  slow.cpu_update /= 8.0;
  for (int window = 0; window < 5; ++window) {
    EXPECT_FALSE(replanner.after_step(run.choice.simulation.rates));
    EXPECT_FALSE(replanner.after_step(window == 0 ? slow : run.choice.simulation.rates));
    EXPECT_FALSE(replanner.after_step(window == 0 ? slow : run.choice.simulation.rates));
  }
}

TEST(Replan, StaysWhereAnotherPlanWouldBringLittle) {
  const PlannedRun run;
  Replanner replanner = run.replanner();
  StepRates rates = run.choice.simulation.rates;
  rates.compute_seconds *= 20.0;  // hides every update
  EXPECT_FALSE(after(replanner, rates, 20));
}

TEST(Replan, BooksRoomForEveryDivisionUnderTheCeilings) {
  const PlannedRun run;
  EXPECT_GT(run.plan.spare_device_memory + run.plan.spare_host_memory, 0U);
  EXPECT_LE(run.plan.memory.device_bytes(), run.facts.device_capacity);
  for (const UpdatePath path : {UpdatePath::cpu, UpdatePath::streamed}) {
    OffloadOptions options = run.options;
    options.policy = parse_policy("static:0");
    options.speculate = Speculate::off;  // memory for taking updates back is used only where there is room
    std::vector<UpdatePath>& paths = options.paths.emplace();
    for (const Subgroup& s : run.plan.subgroups) {
      paths.push_back(s.tier == Tier::device ? UpdatePath::resident : path);
    }
    const Plan other = make_plan(run.layout, options, run.facts);
    EXPECT_LE(other.memory.device_bytes(), run.plan.memory.device_bytes());
    EXPECT_LE(other.memory.host_bytes(), run.plan.memory.host_bytes());
  }
}

TEST(Replan, BooksNoRoomThatIsNotThereForBothSides) {
  PlannedRun run;
  run.plan = run.choice.plan;
  run.facts.device_is_host = true;
  const auto all = [&] { return run.plan.memory.device_bytes() + run.plan.memory.host_bytes(); };
  run.facts.host_available = all() + 1024;
  book_room_for_change(run.plan, run.layout, run.options, run.facts);
  EXPECT_LE(all(), run.facts.host_available);
}

TEST(Replan, RoomForOtherPlansHasItsPageTables) {
  PlannedRun run;
  run.facts.pinned_per_page_table = 8;
  run.facts.device_capacity *= 2;
  run.plan = make_plan(run.layout, run.options, run.facts);
  book_room_for_change(run.plan, run.layout, run.options, run.facts);
  EXPECT_EQ(run.plan.page_tables, page_table_bytes(run.plan.memory.host_bytes(), run.facts, {}));
  EXPECT_LE(run.plan.memory.device_bytes() + run.plan.page_tables, run.facts.device_capacity);
}

TEST(Replan, TheCallersShareOfHostMemoryStaysBooked) {
  PlannedRun run(0.15);
  run.options.reserved_host_memory = std::size_t{1} << 30;
  Replanner replanner = run.replanner();
  StepRates rates = run.choice.simulation.rates;
  rates.to_device /= 8.0;
  rates.to_host /= 8.0;
  EXPECT_TRUE(after(replanner, rates, 6));
}

}  // namespace
}  // namespace tandem
