// Weights of eight-bit products that cross the link in a byte: the bits are those of weights that cross as they are,
// whatever is updated where and when, taken back, skipped, saved or written.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "scheduler/plan/link_codes.hpp"
#include "tests/offload/planned_traffic.hpp"
#include "tests/offload/ranks/toy_group.hpp"

namespace tandem {
namespace {

using testing::toy;
using testing::ToyOptions;
using testing::ToyResult;
using testing::ToyTrainer;

ToyOptions with_factors(const std::string& policy) {
  ToyOptions o = toy(policy);
  o.factors = true;
  o.gradient = DType::bf16;
  o.offload.subgroup_size = 2048;
  return o;
}

ToyOptions streamed_factors(const std::string& policy) {
  ToyOptions o = with_factors(policy);
  o.offload.resident_layers = 0;
  return o;
}

/// Result of training with every weight crossing the link as it is stored.
ToyResult as_stored(ToyOptions o) {
  o.offload.link_codes = false;
  return train_toy(o);
}

std::int64_t layers_in_codes(const Plan& plan) { return std::ranges::count_if(plan.layers, &LayerPlacement::in_codes); }

bool same_or_both_nan(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

void expect_the_bits_of_stored(const ToyOptions& o, const std::string& what) {
  const ToyResult expected = as_stored(o), actual = train_toy(o);
  EXPECT_EQ(actual.digest, expected.digest) << what;
  EXPECT_TRUE(std::ranges::equal(actual.norms, expected.norms, same_or_both_nan)) << what;
  EXPECT_EQ(actual.losses, expected.losses) << what;
  EXPECT_EQ(layers_in_codes(expected.plan), 0) << what;
  EXPECT_GT(layers_in_codes(actual.plan), 0) << what;
  EXPECT_LT(actual.counters.bytes_host_to_device, expected.counters.bytes_host_to_device) << what;
  EXPECT_EQ(actual.device_peak, actual.plan.memory.device_bytes()) << what;
}

std::vector<bf16> bits_seen(ToyTrainer& t, const Parameter& p) {
  const auto scope = t.engine().evaluation();
  const WeightsGuard guard = t.engine().fetch(p.layer, t.stream());
  const TensorView view = guard[p.name];
  std::vector<bf16> bits(static_cast<std::size_t>(view.count()));
  t.device().copy(bits.data(), view.data, view.bytes(), CopyKind::device_to_host, t.stream());
  t.device().synchronize(t.stream());
  return bits;
}

class LinkCodesUnder : public ::testing::TestWithParam<const char*> {};

TEST_P(LinkCodesUnder, OneDigestInOneByteAndInTwo) {
  const ToyResult resident = train_toy(with_factors("device"));
  for (const int stay : {0, 2}) {
    for (const int prefetch : {1, 3}) {
      ToyOptions o = streamed_factors(GetParam());
      o.offload.resident_layers = stay;
      o.offload.prefetch_layers = prefetch;
      o.offload.overlap = prefetch == 3;
      o.offload.poison_released = stay == 0 && prefetch == 1;
      expect_the_bits_of_stored(o, std::to_string(stay) + " resident, " + std::to_string(prefetch) + " ahead");
      EXPECT_EQ(train_toy(o).digest, resident.digest);
      o.evaluate_between = true;
      o.frozen_ends = true;
      expect_the_bits_of_stored(o, "evaluated between");
    }
  }
}

TEST_P(LinkCodesUnder, OneDigestInEveryOrderAndFormat) {
  for (const auto& [micro_batches, at_once] : {std::pair{3, 1}, {3, 3}, {5, 2}}) {
    for (const StateFormat state : adamw_formats) {
      ToyOptions o = streamed_factors(GetParam());
      o.offload.state = state;
      o.micro_batches = micro_batches;
      o.at_once = at_once;
      o.vectors = DType::f32;
      expect_the_bits_of_stored(o, std::to_string(micro_batches) + " micro-batches");
    }
  }
}

TEST_P(LinkCodesUnder, OneDigestWhereStepsAreSkippedOrUpdatedInBackward) {
  ToyOptions o = streamed_factors(GetParam());
  o.steps = 5;
  o.nan_at_step = 2;
  expect_the_bits_of_stored(o, "skipped");
  o.nan_at_step = -1;
  o.max_grad_norm = 0.0;
  o.offload.clips = false;
  o.offload.on_nonfinite = OnNonfinite::stop;
  expect_the_bits_of_stored(o, "in backward");
}

/// Weights that change so much from step to step that their scales do, too.
TEST_P(LinkCodesUnder, OneDigestWhereScalesChange) {
  ToyOptions o = streamed_factors(GetParam());
  o.lr = 0.5;
  o.steps = 6;
  expect_the_bits_of_stored(o, "large steps");
}

TEST_P(LinkCodesUnder, ViewsHaveTheRoundedValues) {
  ToyOptions o = streamed_factors(GetParam()), stored = o;
  stored.offload.link_codes = false;
  ToyTrainer a(o), b(stored);
  ToyResult ignored;
  for (int step = 0; step < 2; ++step) {
    for (const char* name : {"h.0.w", "h.3.w"}) {
      const Parameter& p = a.layout().parameter(name);
      const std::vector<bf16> all = bits_seen(b, p), rounded = testing::rounded_whole(all.data(), p.count);
      const std::vector<bf16> seen = bits_seen(a, p);
      for (std::size_t i = 0; i < seen.size(); ++i) ASSERT_EQ(seen[i].bits, rounded[i].bits) << name << ", " << i;
    }
    a.step(step, ignored);
    b.step(step, ignored);
  }
}

TEST_P(LinkCodesUnder, WhatIsNotFiniteStaysSo) {
  ToyTrainer t(streamed_factors(GetParam()));
  const Parameter& p = t.layout().parameter("h.1.w");
  std::vector<float> values = t.array("h.1.w", StateArray::master);
  for (const float special : {std::numeric_limits<float>::infinity(), std::nanf("")}) {
    const float before = std::exchange(values[1234], special);
    t.engine().write(p, StateArray::master, values);
    for (const bf16 x : bits_seen(t, p)) ASSERT_TRUE(std::isnan(numerics::bf16_to_float(x)));
    values[1234] = before;
    t.engine().write(p, StateArray::master, values);
    for (const bf16 x : bits_seen(t, p)) ASSERT_TRUE(std::isfinite(numerics::bf16_to_float(x)));
  }
}

TEST_P(LinkCodesUnder, OneDigestUnderAnotherPlan) {
  const std::string expected = train_toy(with_factors("device")).digest;
  ToyOptions o = streamed_factors(GetParam());
  o.offload.spare_device_memory = o.offload.spare_host_memory = std::size_t{8} << 20;
  ToyTrainer t(o);
  OffloadOptions other = o.offload;
  ToyResult result;
  for (int step = 0; step < o.steps; ++step) {
    t.step(step, result);
    other.resident_layers = step == 0 ? 3 : 0;
    other.link_codes = step != 0;
    t.engine().adopt(make_plan(t.layout(), other, {o.device.capacity, 0}));
  }
  EXPECT_EQ(t.engine().state_digest(), expected);
}

INSTANTIATE_TEST_SUITE_P(Policies, LinkCodesUnder, ::testing::Values("host", "stream", "interleave:2", "static:0.5"),
                         [](const auto& of) {
                           std::string name = of.param;
                           std::ranges::replace_if(
                               name, [](char c) { return c == ':' || c == '.'; }, '_');
                           return name;
                         });

/// Steps that are clipped or skipped are taken back after their weights have changed on the host.
TEST(LinkCodes, OneDigestWhereUpdatesAreTakenBack) {
  for (const char* policy : {"host", "interleave:2"}) {
    ToyOptions o = streamed_factors(policy);
    o.offload.speculate = Speculate::on;
    o.offload.state = StateFormat::split;
    o.steps = 6;
    o.max_grad_norm = 1e9;
    std::vector<double> norms = train_toy(o).norms;
    std::ranges::sort(norms);
    o.max_grad_norm = 0.5 * (norms[2] + norms[3]);
    expect_the_bits_of_stored(o, "some clipped");
    EXPECT_GT(train_toy_ahead(o).counters.parameters_taken_back, 0U);
    o.max_grad_norm = 1e9;
    o.nan_at_step = 2;
    o.evaluate_between = true;
    expect_the_bits_of_stored(o, "one skipped");
  }
}

TEST(LinkCodes, OneDigestWithStateInAFile) {
  ToyOptions o = testing::with_state_in_file(streamed_factors("interleave:2"), 0.5);
  ToyOptions stored = o;
  stored.offload.link_codes = false;
  EXPECT_EQ(train_toy(o).digest, train_toy(stored).digest);
}

TEST(LinkCodes, RanksSendWeightsAsTheyAre) {
  ToyOptions o = streamed_factors("host");
  o.micro_batches = 6;
  const std::string expected = train_toy(o).digest;
  for (const ToyResult& result : testing::train_toy_group(o, 2)) {
    EXPECT_EQ(result.digest, expected);
    EXPECT_EQ(layers_in_codes(result.plan), 0);
  }
}

TEST(LinkCodes, TheBytesAreThoseOfThePlan) {
  for (const char* policy : {"host", "stream"}) {
    ToyOptions o = streamed_factors(policy);
    o.micro_batches = 2;
    const ParameterLayout layout = testing::toy_layout(o);
    const ToyResult result = train_toy(o);
    const Traffic traffic = testing::planned_traffic(layout, result.plan, o.micro_batches, o.steps);
    EXPECT_EQ(result.counters.bytes_host_to_device, traffic.host_to_device) << policy;
    EXPECT_EQ(result.counters.bytes_device_to_host, traffic.device_to_host) << policy;
  }
}

TEST(LinkCodes, AreForTrainedMatrices) {
  ParameterLayout layout;
  auto layer = layout.add_layer("a");
  EXPECT_THROW(layer.add("frozen", {4, 4}, {.trainable = false, .fp8_factor = true}), MisuseError);
  EXPECT_THROW(layer.add("vector", {4}, {.fp8_factor = true}), MisuseError);
  EXPECT_THROW(layer.add("whole", {4, 4}, {.weight = DType::f32, .fp8_factor = true}), MisuseError);
  layer.add("x", {4, 4}, {.fp8_factor = true});
  layer.add("y", {4, 4});
  EXPECT_THROW(layout.tie("a.x", "a.y"), MisuseError);
  EXPECT_THROW(layout.tie("a.y", "a.x"), MisuseError);
}

}  // namespace
}  // namespace tandem
