// Memory for updates ahead of the gradient norm is the last that a plan gives away.
#include <gtest/gtest.h>

#include <string>

#include "core/base/error.hpp"
#include "scheduler/plan/plan.hpp"

namespace tandem {
namespace {

using namespace literals;  // NOLINT: sizes

/// Eight blocks and an embedding as large as several, tied to the head.
ParameterLayout layers_and_embedding() {
  ParameterLayout layout;
  layout.add_layer("embedding").add("tokens", {50257, 768});
  for (int i = 0; i < 8; ++i) layout.add_layer("h." + std::to_string(i)).add("w", {7077888});
  layout.add_layer("head").add("norm", {768}, {.decay = false}).add("tokens", {50257, 768});
  layout.tie("embedding.tokens", "head.tokens");
  return layout;
}

std::size_t bytes_of_row(const Plan& plan, const std::string& name) {
  std::size_t bytes = 0;
  for (const MemoryEntry& e : plan.memory.entries) bytes += e.name == name ? e.bytes : 0;
  return bytes;
}

/// The rows of a plan's memory but those of its updates ahead of the norm.
std::string rows_without_undo(const Plan& plan) {
  std::string text;
  for (const MemoryEntry& e : plan.memory.entries) {
    if (e.name != "optimizer, undo") text += e.name + " " + std::to_string(e.bytes) + "\n";
  }
  return text;
}

OffloadOptions speculating_by_default(const std::string& policy) {
  OffloadOptions options;
  options.policy = parse_policy(policy);
  return options;
}

OffloadOptions with_speculation(OffloadOptions options, Speculate speculate) {
  options.speculate = speculate;
  return options;
}

// By default updates run ahead of the norm where the host has memory that nothing else takes.
TEST(PlanOfSpeculation, TakesTheHostMemoryThatIsLeft) {
  const ParameterLayout layout = layers_and_embedding();
  for (const char* policy : {"host", "static:0.5", "interleave:2", "auto", "device", "stream"}) {
    for (const std::size_t device : {350_MiB, 700_MiB, 1200_MiB, 64_GiB}) {
      const OffloadOptions options = speculating_by_default(policy);
      EXPECT_EQ(options.speculate, Speculate::automatic);
      const auto without = find_plan(layout, with_speculation(options, Speculate::off), {device, 0});
      const auto roomy = find_plan(layout, options, {device, 0});
      ASSERT_EQ(roomy.has_value(), without.has_value()) << policy << ' ' << device;
      if (!without) continue;
      EXPECT_EQ(rows_without_undo(*roomy), rows_without_undo(*without)) << policy << ' ' << device;
      EXPECT_EQ(roomy->speculating_parameters(), roomy->shares().cpu) << policy << ' ' << device;
      const std::size_t undo = bytes_of_row(*roomy, "optimizer, undo");
      EXPECT_EQ(undo > 0, roomy->shares().cpu > 0) << policy << ' ' << device;
      if (undo == 0) continue;
      const std::size_t all = roomy->memory.host_bytes();
      EXPECT_TRUE(make_plan(layout, options, {device, all}).speculates()) << policy << ' ' << device;
      const Plan tight = make_plan(layout, options, {device, all - 1});
      EXPECT_EQ(rows_without_undo(tight), rows_without_undo(*without)) << policy << ' ' << device;
      EXPECT_FALSE(tight.speculates());
      // A plan that fits without, fits.
      EXPECT_NO_THROW(make_plan(layout, options, {device, all - undo})) << policy << ' ' << device;
      EXPECT_THROW(make_plan(layout, with_speculation(options, Speculate::on), {device, all - 1}), PlanError) << policy;
    }
  }
}

TEST(PlanOfSpeculation, InsistsOnNoMemoryThatIsNotFree) {
  OffloadOptions options = speculating_by_default("host");
  const std::size_t all = make_plan(layers_and_embedding(), options, {350_MiB, 0}).memory.host_bytes();
  options.host_memory = all;
  PlanningFacts facts{350_MiB, all - 1};
  facts.host_limit = 2 * all;
  EXPECT_FALSE(make_plan(layers_and_embedding(), options, facts).speculates());
  EXPECT_TRUE(make_plan(layers_and_embedding(), with_speculation(options, Speculate::on), facts).speculates());
  facts.host_available = all;
  EXPECT_TRUE(make_plan(layers_and_embedding(), options, facts).speculates());
}

TEST(PlanOfSpeculation, SendsNoStateToAFile) {
  const ParameterLayout layout = layers_and_embedding();
  OffloadOptions options = speculating_by_default("host");
  options.state_folder = "DIR";
  const std::size_t all =
      make_plan(layout, with_speculation(options, Speculate::off), {350_MiB, 0}).memory.host_bytes();
  for (const std::size_t host : {all / 2, all - 1, all}) {
    const Plan plan = make_plan(layout, options, {350_MiB, host});
    const Plan without = make_plan(layout, with_speculation(options, Speculate::off), {350_MiB, host});
    EXPECT_EQ(plan.file_bytes_of_step(), without.file_bytes_of_step());
    EXPECT_EQ(plan.file_bytes_of_step() > 0, host < all);
    EXPECT_FALSE(plan.speculates());
  }
}

}  // namespace
}  // namespace tandem
