// Choice of a step's shape, among shapes whose seconds are given.
#include "train/setup/fastest_shape.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <map>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <utility>

#include "core/base/error.hpp"

namespace tandem {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// Name of the shape of a model with one block. "none 4": nothing computed again, four micro-batches at once.
std::string name(const RunShape& shape) {
  const char* kept = shape.offload_inputs           ? "offload"
                     : shape.recomputed_blocks == 1 ? "block"
                     : shape.selective              ? "selective"
                                                    : "none";
  return std::string(kept) + ' ' + std::to_string(shape.micro_batches);
}

ModelConfig model_of(std::int64_t layers) {
  ModelConfig model = builtin_model("tiny-llama");
  model.layers = layers;
  return model;
}

/// A choice of a step that takes so many seconds.
Choice choice_of(double seconds, double faster_than) {
  Choice choice;
  choice.simulation.given_up = seconds > faster_than;
  choice.simulation.step_seconds = choice.simulation.given_up ? 1.001 * faster_than : seconds;
  return choice;
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
    ShapeMachine machine;
    machine.fits = [&](const RunShape& shape) { return seconds.contains(name(shape)); };
    machine.choose = [&](const RunShape& shape, std::span<const LayerSeconds>, double faster_than) {
      asked.push_back(name(shape));
      const auto found = seconds.find(name(shape));
      if (found == seconds.end()) throw PlanError("it does not fit", name(shape), "");
      Choice choice = choice_of(found->second, faster_than);
      choice.plan.layers.push_back({.resident = !streams});
      choice.plan.max_micro_batches = static_cast<int>(grad_accum);
      return choice;
    };
    machine.compute = [&](const RunShape& shape) {
      const auto found = least.find(name(shape));
      const double each = found == least.end() ? 0.0 : found->second / static_cast<double>(grad_accum);
      return std::vector<LayerSeconds>{{0.5 * each, 0.0}, {0.0, 0.5 * each}};
    };
    return fastest_shape(config, model_of(1), {.batch = 1, .sequence = 16}, machine);
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
  EXPECT_THAT(machine.asked, ElementsAre("none 1", "none 8", "none 4", "selective 1", "selective 8", "selective 4",
                                         "selective 2", "block 1", "block 8", "block 4", "block 2", "offload 1",
                                         "offload 8", "offload 4", "offload 2"));
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

TEST(FastestShape, SeveralAtOnceAreTakenWhereOneAtATimeDoesNotFit) {
  Machine machine{{{"none 4", 5.0}, {"block 4", 6.0}, {"block 2", 4.0}, {"offload 8", 4.5}}};
  const FastestShape best = machine.fastest();
  EXPECT_EQ(name(best.shape), "block 2");
  EXPECT_EQ(best.why, one_does_not_fit);
  EXPECT_THROW(machine.fastest(8, AccumulationOrder::micro_batch), PlanError);
}

TEST(FastestShape, OneAfterAnotherSaysWhy) {
  Machine slower{{{"none 1", 7.0}, {"none 8", 9.0}}};
  EXPECT_EQ(slower.fastest().why, "by layer: predicted no faster than 7.007 s/step");
  Machine resident{{{"none 1", 7.0}}, {}, false};
  EXPECT_EQ(resident.fastest().why, "");
  EXPECT_THAT(resident.asked,
              ElementsAre("none 1", "selective 1", "selective 8", "selective 4", "selective 2", "block 1", "block 8",
                          "block 4", "block 2", "offload 1", "offload 8", "offload 4", "offload 2"));
  Machine asked{{{"none 1", 7.0}, {"none 8", 6.0}}};
  EXPECT_EQ(asked.fastest(8, AccumulationOrder::micro_batch).why, as_asked);
}

TEST(FastestShape, KeepsLessWhereThatIsFaster) {
  Machine machine{{{"none 1", 9.0}, {"block 1", 5.0}, {"offload 1", 5.5}}};
  EXPECT_EQ(name(machine.fastest(1).shape), "block 1");
  machine.seconds["selective 1"] = 4.5;
  EXPECT_EQ(name(machine.fastest(1).shape), "selective 1");
  Machine computes{{{"none 1", 5.0}, {"block 1", 4.0}}, {{"selective 1", 6.0}, {"block 1", 6.0}, {"offload 1", 6.0}}};
  EXPECT_EQ(name(computes.fastest(1).shape), "none 1");
  EXPECT_THAT(computes.asked, ElementsAre("none 1"));
}

// Shapes without a number of blocks: all computed again and their inputs on the host; none, but without norms and
// activations kept.
constexpr std::int64_t offloaded = -1, selectively = -2;

/// A model of 16 blocks, and seconds by how many of them are computed again.
struct Blocks {
  std::function<double(std::int64_t)> seconds;
  std::function<double(std::int64_t)> compute = [](std::int64_t) { return 0.0; };
  std::int64_t fewest = 0;  ///< least number of blocks with which the shape fits
  std::vector<std::int64_t> asked{};

  static std::int64_t key(const RunShape& s) {
    if (s.offload_inputs) return offloaded;
    // Between none and all there is no other way to keep the rest.
    EXPECT_TRUE(s.selective || s.recomputed_blocks == 0 || s.recomputed_blocks == 16);
    return s.recomputed_blocks == 0 && s.selective ? selectively : s.recomputed_blocks;
  }
  FastestShape fastest(const TrainConfig& config = {}, RunShape first = {.batch = 1, .sequence = 16}) {
    ShapeMachine machine;
    machine.fits = [&](const RunShape& s) { return s.recomputed_blocks >= fewest; };
    machine.compute = [&](const RunShape& s) { return std::vector<LayerSeconds>{{0.0, compute(s.recomputed_blocks)}}; };
    machine.choose = [&](const RunShape& s, std::span<const LayerSeconds>, double faster_than) {
      asked.push_back(key(s));
      if (s.recomputed_blocks < fewest) throw PlanError("it does not fit", "", "");
      return choice_of(seconds(key(s)), faster_than);
    };
    return fastest_shape(config, model_of(16), first, machine);
  }
};

TEST(FastestShapeOfBlocks, LiesBetweenKeepingAllAndNone) {
  Blocks blocks{[](std::int64_t n) { return n < 0 ? 20.0 : 10.0 + static_cast<double>(std::abs(n - 12)); }};
  EXPECT_EQ(blocks.fastest().shape.recomputed_blocks, 12);
  EXPECT_THAT(blocks.asked, ElementsAre(0, selectively, 16, offloaded, 8, 12));
}

// The fewest blocks that fit are the fastest where computing is all, and more are not looked at.
TEST(FastestShapeOfBlocks, IsTheFewestThatFitWhereNothingElseCounts) {
  const auto computes = [](std::int64_t n) { return 10.0 + static_cast<double>(n == offloaded ? 16 : n); };
  Blocks blocks{computes, computes, 5};
  EXPECT_EQ(blocks.fastest().shape.recomputed_blocks, 5);
  EXPECT_THAT(blocks.asked, ElementsAre(0, selectively, 16, 5));
}

TEST(FastestShapeOfBlocks, IsNeverSlowerThanAllNoneOrOffloaded) {
  std::mt19937_64 random(7);
  for (int i = 0; i < 500; ++i) {
    std::map<std::int64_t, double> seconds;
    for (std::int64_t n = selectively; n <= 16; ++n) seconds[n] = 1.0 + 1e-3 * static_cast<double>(random() % 1000);
    Blocks blocks{[&](std::int64_t n) { return seconds.at(n); }};
    blocks.fewest = static_cast<std::int64_t>(random() % 17);
    double best = std::min(seconds[16], seconds[offloaded]);
    if (blocks.fewest == 0) best = std::min({best, seconds[0], seconds[selectively]});
    const FastestShape found = blocks.fastest();
    EXPECT_LE(found.choice.simulation.step_seconds, best);
    EXPECT_EQ(found.choice.simulation.step_seconds, seconds.at(Blocks::key(found.shape)));
    EXPECT_LE(blocks.asked.size(), 8U) << "it is to take little time";
  }
}

TEST(FastestShapeOfBlocks, IsAsTheConfigurationSays) {
  Blocks blocks{[](std::int64_t n) { return 20.0 - static_cast<double>(n); }};
  TrainConfig config;
  config.recompute = Recompute{.blocks = 3, .selective = true};
  EXPECT_EQ(blocks.fastest(config, {.sequence = 16, .recomputed_blocks = 3, .selective = true}).shape.recomputed_blocks,
            3);
  config.recompute = std::nullopt;
  const RunShape offload{.sequence = 16, .recomputed_blocks = 16, .offload_inputs = true};
  EXPECT_TRUE(blocks.fastest(config, offload).shape.offload_inputs);
  EXPECT_THAT(blocks.asked, ElementsAre(3, offloaded));
}

TEST(FewestRecomputed, AreFoundWhateverFits) {
  for (const std::int64_t layers : {1, 2, 7, 48}) {
    for (std::int64_t fewest = 0; fewest <= layers; ++fewest) {
      const auto fits = [&](const RunShape& shape) { return shape.recomputed_blocks >= fewest; };
      EXPECT_EQ(fewest_recomputed(model_of(layers), {}, fits), fewest) << layers;
    }
    EXPECT_EQ(fewest_recomputed(model_of(layers), {}, [](const RunShape&) { return false; }), layers);
  }
}

}  // namespace
}  // namespace tandem
