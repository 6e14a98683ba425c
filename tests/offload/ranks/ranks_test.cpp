// "The number of ranks changes time, never results": several devices leave the bits that one does with all of their
// micro-batches.
#include <gtest/gtest.h>

#include "tests/offload/planned_traffic.hpp"
#include "tests/offload/ranks/toy_group.hpp"

namespace tandem {
namespace {

using testing::toy;
using testing::ToyOptions;
using testing::ToyResult;
using testing::ToyTrainer;
using testing::train_toy;
using testing::train_toy_group;

/// Result of one rank, with everything on its device.
const ToyResult& reference(int micro_batches, bool frozen_ends = false) {
  ToyOptions o = toy("device");
  o.micro_batches = micro_batches;
  o.frozen_ends = frozen_ends;
  return testing::reference_of(o);
}

/// Each rank has seen its own micro-batches' losses.
void expect_same(const std::vector<ToyResult>& results, const ToyResult& expected, int micro_batches) {
  const auto ranks = results.size();
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    EXPECT_EQ(results[rank].digest, expected.digest) << "rank " << rank;
    EXPECT_EQ(results[rank].norms, expected.norms) << "rank " << rank;
    std::vector<float> losses;
    for (std::size_t i = 0; i < expected.losses.size(); ++i) {
      if (i % static_cast<std::size_t>(micro_batches) % ranks == rank) losses.push_back(expected.losses[i]);
    }
    EXPECT_EQ(results[rank].losses, losses) << "rank " << rank;
  }
}

class RanksOfEveryPolicy : public ::testing::TestWithParam<const char*> {
 protected:
  bool fixed() const { return std::string(GetParam()) == "device"; }
};

TEST_P(RanksOfEveryPolicy, GiveTheBitsOfOne) {
  for (const auto& [ranks, micro_batches] : {std::pair{2, 2}, {3, 6}}) {
    ToyOptions o = toy(GetParam());
    o.micro_batches = micro_batches;
    expect_same(train_toy_group(o, ranks), reference(micro_batches), micro_batches);
  }
}

TEST_P(RanksOfEveryPolicy, GiveTheBitsOfOneWhereUpdatesRunBeforeTheNormIsKnown) {
  ToyOptions o = toy("device");
  o.micro_batches = 4;
  for (const double limit : {1.0, 1e9}) {
    o.max_grad_norm = limit;
    o.offload.policy = parse_policy("device");
    const ToyResult& expected = testing::reference_of(o);
    o.offload.policy = parse_policy(GetParam());
    ToyOptions ahead = o;
    ahead.offload.speculate = Speculate::on;
    ahead.offload.subgroup_size = 2048;
    expect_same(train_toy_group(ahead, 2), expected, 4);
  }
}

TEST_P(RanksOfEveryPolicy, GiveTheBitsOfOneForEverySubgroupSizeAndResidency) {
  for (const std::int64_t size : {std::int64_t{1}, std::int64_t{2048}, std::int64_t{1} << 20}) {
    for (const int resident : {0, 1, 6}) {
      ToyOptions o = toy(GetParam());
      o.micro_batches = 4;
      o.at_once = resident == 1 ? 2 : 1;
      o.offload.subgroup_size = size;
      o.offload.resident_layers = fixed() ? std::nullopt : std::optional(resident);
      o.offload.prefetch_layers = 1 + resident % 3;
      expect_same(train_toy_group(o, 2), reference(4), 4);
    }
  }
}

TEST_P(RanksOfEveryPolicy, AddUpInTheOrderOfMicroBatches) {
  ToyOptions o = toy("device");
  o.uneven = true;
  o.micro_batches = 6;
  const ToyResult& expected = testing::reference_of(o);
  o.offload.policy = parse_policy(GetParam());
  for (const int ranks : {1, 2, 3, 6}) {
    for (const int at_once : {1, 2}) {
      o.at_once = at_once;
      const std::vector<ToyResult> results = ranks == 1 ? std::vector{train_toy(o)} : train_toy_group(o, ranks);
      expect_same(results, expected, 6);
    }
  }
}

TEST_P(RanksOfEveryPolicy, GiveTheBitsOfOneBetweenFrozenLayers) {
  for (const bool bf16_gradients : {false, true}) {
    for (const int resident : {0, 3}) {
      ToyOptions o = toy(GetParam());
      o.micro_batches = 2;
      o.frozen_ends = true;
      o.evaluate_between = true;
      o.gradient = bf16_gradients ? DType::bf16 : DType::f32;
      o.offload.resident_layers = fixed() ? std::nullopt : std::optional(resident);
      expect_same(train_toy_group(o, 2), reference(2, true), 2);
    }
  }
}

TEST_P(RanksOfEveryPolicy, GiveTheBitsOfOneInEveryFormatAndOrder) {
  for (const StateFormat state :
       {StateFormat::split, StateFormat::bf16_moments, StateFormat::byte_moments, StateFormat::lion}) {
    ToyOptions o = toy("device");
    o.micro_batches = 3;
    o.offload.state = state;
    o.offload.seed = 11;
    const ToyResult& expected = testing::reference_of(o);
    o.offload.policy = parse_policy(GetParam());
    o.offload.subgroup_size = 2048;
    o.owners_make = state == StateFormat::split;
    o.offload.overlap = state != StateFormat::bf16_moments;
    expect_same(train_toy_group(o, 3), expected, 3);
  }
}

TEST_P(RanksOfEveryPolicy, GiveTheBitsOfOneWhereUpdatesRunInBackward) {
  ToyOptions o = toy("device");
  o.micro_batches = 2;
  o.max_grad_norm = 0.0;
  const ToyResult& expected = testing::reference_of(o);
  o.offload.policy = parse_policy(GetParam());
  o.offload.on_nonfinite = OnNonfinite::stop;
  o.offload.resident_layers = fixed() ? std::nullopt : std::optional(2);
  expect_same(train_toy_group(o, 2), expected, 2);
}

TEST_P(RanksOfEveryPolicy, GiveTheBitsOfOneWithStateInAFile) {
  ToyOptions o = toy("device");
  o.micro_batches = 2;
  o.width = 20'000;  // more than goes into the buffers of what is on its way
  const ToyResult& expected = testing::reference_of(o);
  o.offload.policy = parse_policy(GetParam());
  o = testing::with_state_in_files(o, 2, 0.9);
  const std::vector<ToyResult> results = train_toy_group(o, 2);
  expect_same(results, expected, 2);
  for (const ToyResult& result : results) {
    EXPECT_EQ(result.counters.bytes_from_file > 0, result.plan.shares().resident < 2 * o.width);
  }
}

TEST_P(RanksOfEveryPolicy, SkipANonFiniteStepTogether) {
  ToyOptions o = toy("device");
  o.micro_batches = 2;
  o.nan_at_step = 1;
  const ToyResult& expected = testing::reference_of(o);
  o.offload.policy = parse_policy(GetParam());
  const std::vector<ToyResult> results = train_toy_group(o, 2);
  for (const ToyResult& result : results) {
    EXPECT_EQ(result.skipped, 1);
    EXPECT_EQ(result.digest, expected.digest);
  }
}

TEST_P(RanksOfEveryPolicy, MoveTheBytesAndTakeTheMemoryThatTheirPlansSay) {
  for (const int ranks : {2, 3}) {
    ToyOptions o = toy(GetParam());
    o.micro_batches = 2 * ranks;
    o.offload.resident_layers = fixed() ? std::nullopt : std::optional(2);
    const ParameterLayout layout = testing::toy_layout(o);
    std::uint64_t updated = 0;
    for (const ToyResult& result : train_toy_group(o, ranks)) {
      const Traffic planned = testing::planned_traffic(layout, result.plan, 2, o.steps);
      EXPECT_EQ(result.counters.bytes_host_to_device, planned.host_to_device);
      EXPECT_EQ(result.counters.bytes_device_to_host, planned.device_to_host);
      EXPECT_EQ(result.counters.bytes_from_peers, planned.from_peers);
      EXPECT_GT(planned.from_peers, 0U);
      EXPECT_EQ(result.device_peak, result.plan.memory.device_bytes());
      updated += result.counters.parameters_updated_cpu + result.counters.parameters_updated_streamed +
                 result.counters.parameters_updated_resident;
    }
    const EngineCounters& one = reference(2).counters;
    EXPECT_EQ(updated, one.parameters_updated_resident) << "each is updated once, whoever owns it";
  }
}

TEST(Ranks, GiveTheBitsOfOneWhereSomeOwnNothingOfALayer) {
  ToyOptions o = toy("interleave:2,resident=0.4");
  o.micro_batches = 9;
  expect_same(train_toy_group(o, 9), reference(9), 9);
}

INSTANTIATE_TEST_SUITE_P(Policies, RanksOfEveryPolicy,
                         ::testing::Values("device", "host", "static:0.3", "interleave:2", "interleave:2,resident=0.4",
                                           "stream", "auto"));

}  // namespace
}  // namespace tandem
