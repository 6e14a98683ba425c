// Which shape of a step is chosen, from shapes whose seconds are given.
#include "train/fastest_shape.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <map>
#include <span>
#include <string>
#include <utility>

#include "core/error.hpp"

namespace tandem {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// "none 4": nothing computed again, four micro-batches at once.
std::string name(const RunShape& shape) {
  const char* kept = shape.offload_inputs ? "offload" : shape.recompute ? "block" : "none";
  return std::string(kept) + ' ' + std::to_string(shape.micro_batches);
}

/// Machines on which shapes take so many seconds; those that are not named do not fit.
struct Machine {
  std::map<std::string, double> seconds;
  std::map<std::string, double> least{};
  bool streams = true;
  std::vector<std::string> asked{};

  FastestShape fastest(std::int64_t grad_accum = 8, AccumulationOrder order = AccumulationOrder::automatic) {
    TrainConfig config;
    config.grad_accum = grad_accum;
    config.accumulation_order = order;
    const auto choose = [&](const RunShape& shape, std::span<const LayerSeconds>, double faster_than) {
      asked.push_back(name(shape));
      const auto found = seconds.find(name(shape));
      if (found == seconds.end()) throw PlanError("it does not fit", name(shape), "");
      Choice choice;
      choice.plan.layers.push_back({.resident = !streams});
      choice.plan.max_micro_batches = static_cast<int>(grad_accum);
      choice.simulation.given_up = found->second > faster_than;
      choice.simulation.step_seconds = std::min(found->second, 1.001 * faster_than);
      return choice;
    };
    const auto compute = [&](const RunShape& shape) {
      const auto found = least.find(name(shape));
      const double each = found == least.end() ? 0.0 : found->second / static_cast<double>(grad_accum);
      return std::vector<LayerSeconds>{{0.5 * each, 0.0}, {0.0, 0.5 * each}};
    };
    return fastest_shape(config, {.batch = 1, .sequence = 16, .training = true}, compute, choose);
  }
};

TEST(FastestShape, AsManyMicroBatchesAtOnceAsAreFaster) {
  Machine machine{{{"none 1", 9.0}, {"none 8", 8.0}, {"none 4", 7.0}, {"none 2", 7.5}}};
  const FastestShape best = machine.fastest();
  EXPECT_EQ(name(best.shape), "none 4");
  EXPECT_EQ(best.choice.simulation.step_seconds, 7.0);
  EXPECT_THAT(best.why, HasSubstr("predicted 7 s/step instead of 9"));
}

TEST(FastestShape, FewerAreNotTriedOnceTheyAreNoFaster) {
  Machine machine{{{"none 1", 9.0}, {"none 8", 7.0}, {"none 4", 8.0}, {"none 2", 6.0}}};
  EXPECT_EQ(name(machine.fastest().shape), "none 8");
  EXPECT_THAT(machine.asked, ElementsAre("none 1", "none 8", "none 4", "block 1", "offload 1"));
}

TEST(FastestShape, WhatDoesNotFitIsPassedOver) {
  Machine machine{{{"block 1", 9.0}, {"block 2", 8.0}}};
  EXPECT_EQ(name(machine.fastest().shape), "block 2");
  Machine alone{{{"none 1", 9.0}}};
  const FastestShape one = alone.fastest();
  EXPECT_EQ(name(one.shape), "none 1");
  EXPECT_EQ(one.why, none_fit);
  Machine small{{}};
  EXPECT_THROW(small.fastest(), PlanError);
  Machine smallest{{{"offload 1", 9.0}}};
  EXPECT_EQ(name(smallest.fastest().shape), "offload 1");
}

TEST(FastestShape, OneAfterAnotherSaysWhy) {
  Machine slower{{{"none 1", 7.0}, {"none 8", 9.0}}};
  EXPECT_EQ(slower.fastest().why, "by layer: predicted no faster than 7.007 s/step");
  Machine resident{{{"none 1", 7.0}}, {}, false};
  EXPECT_EQ(resident.fastest().why, "");
  EXPECT_THAT(resident.asked, ElementsAre("none 1", "block 1", "offload 1"));
  Machine asked{{{"none 1", 7.0}, {"none 8", 6.0}}};
  EXPECT_EQ(asked.fastest(8, AccumulationOrder::micro_batch).why, as_asked);
}

TEST(FastestShape, KeepsLessWhereThatIsFaster) {
  Machine machine{{{"none 1", 9.0}, {"block 1", 5.0}, {"offload 1", 5.5}}};
  EXPECT_EQ(name(machine.fastest(1).shape), "block 1");
  Machine computes{{{"none 1", 5.0}, {"block 1", 4.0}}, {{"block 1", 6.0}, {"offload 1", 6.0}}};
  EXPECT_EQ(name(computes.fastest(1).shape), "none 1");
  EXPECT_THAT(computes.asked, ElementsAre("none 1"));
}

}  // namespace
}  // namespace tandem
