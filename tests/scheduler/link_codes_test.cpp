// Weights of eight-bit products that cross the link in a byte an element: which layers' do, what that takes, and when
// their codes are made.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "scheduler/plan/link_codes.hpp"
#include "scheduler/plan/rank_slice.hpp"
#include "scheduler/search/auto.hpp"
#include "tests/scheduler/lowered.hpp"
#include "tests/scheduler/machines.hpp"

namespace tandem {
namespace {

using testing::Lowered;
using testing::small_layout;

constexpr std::size_t plenty = std::size_t{1} << 34;

OffloadOptions streaming() {
  OffloadOptions options;
  options.policy = Policy::host();
  options.resident_layers = 0;
  return options;
}

Plan planned(const OffloadOptions& options, const PlanningFacts& facts = {plenty, 0}) {
  return make_plan(small_layout(DType::bf16, true), options, facts);
}

std::int64_t layers_in_codes(const Plan& plan) { return std::ranges::count_if(plan.layers, &LayerPlacement::in_codes); }

std::size_t bytes_in_row(const Plan& plan, std::string_view name, Place place) {
  const auto row = std::ranges::find_if(plan.memory.entries,
                                        [&](const MemoryEntry& e) { return e.name == name && e.place == place; });
  return row == plan.memory.entries.end() ? 0 : row->bytes;
}

TEST(LinkCodes, AreOfStreamedLayersThatHaveFactors) {
  EXPECT_EQ(layers_in_codes(planned(streaming())), 5);  // not embedding and head
  OffloadOptions some = streaming();
  some.resident_layers = 4;
  const Plan plan = planned(some);
  EXPECT_GT(layers_in_codes(plan), 0);
  for (const LayerPlacement& l : plan.layers) EXPECT_FALSE(l.resident && l.in_codes);
  some.policy = Policy::device();
  some.resident_layers.reset();
  EXPECT_EQ(layers_in_codes(planned(some)), 0);
  OffloadOptions off = streaming();
  off.link_codes = false;
  EXPECT_EQ(layers_in_codes(planned(off)), 0);
  EXPECT_EQ(layers_in_codes(make_plan(small_layout(DType::bf16), streaming(), {plenty, 0})), 0);
  OffloadOptions of_ranks = streaming();
  of_ranks.rank.count = 2;
  EXPECT_EQ(layers_in_codes(planned(of_ranks)), 0);
}

TEST(LinkCodes, AreRowsOfThePlan) {
  const ParameterLayout layout = small_layout(DType::bf16, true);
  const Layer& layer = layout.layer(1);
  const std::int64_t scales = factor_scales(layout.parameter("h.0.f"));
  EXPECT_EQ(scales, 3 * 4);
  const std::size_t bytes = align_up(150'528 + static_cast<std::size_t>(scales) * 4);
  EXPECT_EQ(align_up(code_bytes(layer)), bytes);
  const Plan plan = planned(streaming());
  EXPECT_EQ(bytes_in_row(plan, "weights, in a byte", Place::pinned), 5 * bytes);
  EXPECT_EQ(bytes_in_row(plan, "weights, in a byte", Place::device), 2 * bytes);
  EXPECT_THAT(plan.table(), ::testing::HasSubstr("cross the link in a byte each, in 5 layers"));
}

TEST(LinkCodes, AreLeftOutWhereHostMemoryIsShort) {
  OffloadOptions off = streaming();
  off.link_codes = false;
  off.speculate = Speculate::off;
  const std::size_t without = planned(off).memory.host_bytes();
  OffloadOptions tight = streaming();
  tight.speculate = Speculate::off;
  const std::size_t with = planned(tight).memory.host_bytes();
  tight.host_memory = with - 1;
  EXPECT_EQ(layers_in_codes(planned(tight)), 0);
  EXPECT_EQ(planned(tight).memory.host_bytes(), without);
  tight.host_memory = with;
  EXPECT_EQ(layers_in_codes(planned(tight)), 5);
}

TEST(LinkCodes, AFetchHasTheBytesOfTheCodesAndOfAllElse) {
  Lowered run("host", 0, 2, StateFormat::fp32, {1, 1}, DType::bf16, {}, true);
  run.steps(1);
  for (const Task& t : run.tasks) {
    if (t.kind != TaskKind::fetch_weights) continue;
    const Layer& layer = layer_at(run.layout, t.layer);
    const std::size_t stored = weight_bytes(layer, slice_of(layer, {}));
    const bool coded = placement_at(run.plan, t.layer).in_codes;
    EXPECT_EQ(coded, t.code_buffer >= 0);
    EXPECT_EQ(t.bytes, coded ? stored - 150'528 + 12 * sizeof(float) : stored) << layer.name;
  }
}

/// All elements of a layer that are of no factor, once.
TEST(LinkCodes, WhatHasNoneCrossesAsItIs) {
  const ParameterLayout layout = small_layout(DType::bf16, true);
  for (const Layer& layer : layout.layers()) {
    std::vector<int> crossed(static_cast<std::size_t>(layer.elements));
    for_uncoded(layer, [&](std::int64_t begin, std::int64_t count) {
      for (std::int64_t i = begin; i < begin + count; ++i) ++crossed[static_cast<std::size_t>(i)];
    });
    for_factors(layer, [&](const Parameter& p, std::size_t, std::size_t) {
      for (std::int64_t i = 0; i < p.padded_count; ++i) ++crossed[static_cast<std::size_t>(p.offset + i)];
    });
    EXPECT_EQ(std::ranges::count(crossed, 1), layer.elements) << layer.name;
  }
}

/// Once at the beginning, and then once after each update, before the next fetch.
TEST(LinkCodes, AreMadeOnceForNewWeights) {
  Lowered run("interleave:2", 0, 1, StateFormat::fp32, {2, 1}, DType::bf16, {}, true);
  run.steps(3);
  for (int l = 1; l <= 5; ++l) {
    int encoded = 0;
    bool stale = true;
    for (const Task& t : run.tasks) {
      if (t.layer != LayerIndex(l)) continue;
      if (t.kind == TaskKind::encode_weights) {
        EXPECT_TRUE(stale) << "codes of weights that have not changed";
        stale = false;
        ++encoded;
      }
      if (t.kind == TaskKind::fetch_weights) {
        EXPECT_FALSE(stale) << "codes of old weights";
      }
      if (t.kind == TaskKind::update_cpu || t.kind == TaskKind::store_weights) stale = true;
    }
    EXPECT_EQ(encoded, 4) << l;
  }
}

TEST(LinkCodes, AreMadeAnewWhereWeightsWereWritten) {
  const Plan plan = planned(streaming());
  const ParameterLayout layout = small_layout(DType::bf16, true);
  Lowering lowering(layout, plan);
  TaskList tasks;
  lowering.begin_evaluation();
  const auto encoded = [&] {
    tasks.clear();
    lowering.release(lowering.use(LayerIndex(1), tasks));
    return std::ranges::count(tasks, TaskKind::encode_weights, &Task::kind);
  };
  EXPECT_EQ(encoded(), 1);
  EXPECT_EQ(encoded(), 0);
  lowering.invalidate_weights();
  EXPECT_EQ(encoded(), 1);
}

/// A slow link takes codes; where the CPU is what a step waits for, weights cross as they are.
TEST(LinkCodes, AreTakenWhereTheyArePredictedToBeFaster) {
  const ParameterLayout layout = small_layout(DType::bf16, true);
  MachineProfile machine = testing::desktop();
  const std::vector<LayerSeconds> compute(7, {1e-6, 2e-6});
  OffloadOptions options = streaming();
  options.max_micro_batches = 4;
  const auto chosen = [&] { return choose_plan(layout, options, {plenty, 0}, machine, compute).plan; };
  machine.to_device.value /= 20.0;
  EXPECT_EQ(layers_in_codes(chosen()), 5);
  machine.to_device.value *= 20.0;
  machine.host_stream.value /= 1000.0;
  EXPECT_EQ(layers_in_codes(chosen()), 0);
}

}  // namespace
}  // namespace tandem
