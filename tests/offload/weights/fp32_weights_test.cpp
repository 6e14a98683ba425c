// Parameters whose weights are kept in fp32: they and their gradients are never rounded, whatever the plan, and cross
// the link with four bytes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "core/base/error.hpp"
#include "scheduler/plan/rank_slice.hpp"
#include "tests/offload/ranks/toy_group.hpp"

namespace tandem {
namespace {

using testing::toy;
using testing::ToyOptions;
using testing::ToyResult;
using testing::ToyTrainer;

ToyOptions with_fp32_vectors(const char* policy, StateFormat state = StateFormat::fp32, int micro_batches = 1) {
  ToyOptions o = toy(policy);
  o.vectors = DType::f32;
  o.micro_batches = micro_batches;
  o.offload.state = state;
  o.offload.seed = 11;
  return o;
}

class Fp32Weights : public ::testing::TestWithParam<const char*> {
 protected:
  bool fixed() const { return std::string(GetParam()) == "device"; }
};

TEST_P(Fp32Weights, HaveOneDigest) {
  for (const StateFormat state : state_formats) {
    for (const int micro_batches : {1, 3}) {
      const std::string expected = train_toy(with_fp32_vectors("device", state, micro_batches)).digest;
      for (const auto& [size, resident] : {std::pair{1, 0}, {2048, 3}, {1 << 20, 6}}) {
        ToyOptions o = with_fp32_vectors(GetParam(), state, micro_batches);
        o.offload.subgroup_size = size;
        if (!fixed()) o.offload.resident_layers = resident;
        EXPECT_EQ(train_toy(o).digest, expected) << name_of(state) << ", " << micro_batches << ", " << size;
      }
      ToyOptions at_once = with_fp32_vectors(GetParam(), state, micro_batches);
      at_once.at_once = micro_batches;
      EXPECT_EQ(train_toy(at_once).digest, expected) << name_of(state);
    }
  }
}

/// All weights of the plain layers in fp32: several subgroups of them in a layer, of several pieces each.
ToyOptions with_all_in_fp32(const char* policy, int micro_batches) {
  ToyOptions o = with_fp32_vectors(policy, StateFormat::split, micro_batches);
  o.matrices = DType::f32;
  return o;
}

TEST_P(Fp32Weights, OfSeveralPiecesHaveOneDigest) {
  for (const int micro_batches : {1, 3}) {
    const std::string expected = train_toy(with_all_in_fp32("device", micro_batches)).digest;
    for (const auto& [size, resident] : {std::pair{1, 3}, {2048, 0}, {2048, 6}, {1 << 20, 0}}) {
      ToyOptions o = with_all_in_fp32(GetParam(), micro_batches);
      o.offload.subgroup_size = size;
      if (!fixed()) o.offload.resident_layers = resident;
      EXPECT_EQ(train_toy(o).digest, expected) << micro_batches << ", " << size << ", " << resident;
    }
  }
  const std::string expected = train_toy(with_all_in_fp32("device", 6)).digest;
  for (const int ranks : {2, 3}) {
    ToyOptions o = with_all_in_fp32(GetParam(), 6);
    o.offload.subgroup_size = 2048;
    for (const ToyResult& result : train_toy_group(o, ranks)) EXPECT_EQ(result.digest, expected) << ranks;
  }
}

TEST_P(Fp32Weights, AreReadAsTheyWereGiven) {
  ToyTrainer t(with_all_in_fp32(GetParam(), 1));
  const auto value = [](const Parameter& p, std::size_t i) {
    return testing::noise(std::hash<std::string>{}(p.full_name), i);
  };
  t.engine().initialize([&](const Parameter& p, std::span<float> values) {
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = value(p, i);
  });
  const auto expect_given = [&] {
    for (const char* name : {"first.bias", "h.1.b", "h.1.w", "h.1.frozen", "h.3.w", "last.norm"}) {
      const Parameter& p = t.layout().parameter(name);
      const std::vector<float> read = t.array(name, StateArray::master);
      for (std::size_t i = 0; i < read.size(); ++i) ASSERT_EQ(read[i], value(p, i)) << name << ", " << i;
    }
  };
  expect_given();
  const Parameter& p = t.layout().parameter("h.1.w");
  const std::vector<float> all = t.array("h.1.w", StateArray::master);
  t.engine().write(p, StateArray::master, 1500, std::span(all).subspan(1500, 700));
  t.engine().set_step(0);
  expect_given();
}

TEST_P(Fp32Weights, HaveTheDigestOfOneRank) {
  for (const auto& [ranks, state] :
       {std::pair{2, StateFormat::split}, {3, StateFormat::split}, {3, StateFormat::lion}}) {
    const std::string expected = train_toy(with_fp32_vectors("device", state, 6)).digest;
    for (const ToyResult& result : train_toy_group(with_fp32_vectors(GetParam(), state, 6), ranks)) {
      EXPECT_EQ(result.digest, expected) << ranks << ", " << name_of(state);
    }
  }
}

TEST_P(Fp32Weights, MayHaveTheirStateInAFile) {
  for (const StateFormat state : {StateFormat::fp32, StateFormat::bf16_moments, StateFormat::lion}) {
    const ToyOptions o = with_fp32_vectors(GetParam(), state);
    if (fixed()) continue;
    EXPECT_EQ(train_toy(testing::with_state_in_file(o, 0.7)).digest, train_toy(o).digest) << name_of(state);
  }
}

numerics::AdamElement updated(StateFormat state, const numerics::AdamElement& e, float gradient,
                              const AdamCoefficients& c) {
  if (!is_lion(state)) return numerics::adamw(e, gradient, c);
  const numerics::LionElement next = numerics::lion({e.master, e.m}, gradient, c);
  return {next.master, next.m, 0.0F};
}

/// Compares with the formula by hand: gradients of several micro-batches are added as fp32, and nothing is rounded.
void expect_formula_without_rounding(const char* policy, StateFormat state) {
  for (const int micro_batches : {1, 2}) {
    ToyOptions o = with_fp32_vectors(policy, state, micro_batches);
    o.max_grad_norm = 0.0;
    ToyTrainer t(o);
    const Parameter& p = t.layout().parameter("h.1.b");
    const std::vector<float> start = t.array("h.1.b", StateArray::master);
    ToyResult ignored;
    for (int s = 0; s < 3; ++s) t.step(s, ignored);
    const std::vector<float> actual = t.array("h.1.b", StateArray::master);
    const std::vector<float> m = t.array("h.1.b", StateArray::m), v = t.array("h.1.b", StateArray::v);
    int beyond_bf16 = 0;
    for (std::size_t i = 0; i < start.size(); ++i) {
      numerics::AdamElement e{start[i], 0.0F, 0.0F};
      for (int s = 0; s < 3; ++s) {
        float gradient = 0.0F;
        for (int micro = 0; micro < micro_batches; ++micro) {
          const auto key =
              static_cast<std::uint64_t>(o.seed) + static_cast<std::uint64_t>(s * 1000 + micro * 100 + p.layer);
          const float d = e.master - testing::noise(key, i);
          gradient = micro == 0 ? d : gradient + d;
        }
        e = updated(state, e, gradient, numerics::adam_coefficients(o.offload.adamw, s + 1, o.lr * 0.5, 1.0, false));
      }
      EXPECT_EQ(actual[i], e.master) << i;
      EXPECT_EQ(m[i], e.m) << i;
      EXPECT_EQ(v[i], e.v) << i;
      beyond_bf16 += numerics::bf16_to_float(numerics::round_to_bf16(actual[i])) == actual[i] ? 0 : 1;
    }
    EXPECT_GT(beyond_bf16, 30);
  }
}

TEST_P(Fp32Weights, AreTheFormulaWithoutRounding) { expect_formula_without_rounding(GetParam(), StateFormat::split); }
TEST_P(Fp32Weights, AreTheFormulaOfLionWithoutRounding) {
  expect_formula_without_rounding(GetParam(), StateFormat::lion);
}

TEST_P(Fp32Weights, AreSeenThroughGuardsAndFrozenOnesToo) {
  ToyTrainer t(with_fp32_vectors(GetParam()));
  ToyResult ignored;
  t.step(0, ignored);
  const auto scope = t.engine().evaluation();
  const WeightsGuard weights = t.engine().fetch(2, t.stream());
  EXPECT_EQ(weights["w"].dtype, DType::bf16);
  for (const char* name : {"b", "frozen"}) {
    const TensorView view = weights[name];
    ASSERT_EQ(view.dtype, DType::f32) << name;
    std::vector<float> seen(static_cast<std::size_t>(view.count()));
    t.toy_device().enqueue(t.stream(), "look", view, {}, [&](const bf16* values, void*) {
      for (std::size_t i = 0; i < seen.size(); ++i) {
        seen[i] = testing::weight_at(view, values, static_cast<std::int64_t>(i));
      }
    });
    t.device().synchronize(t.stream());
    EXPECT_THAT(seen, ::testing::Contains(::testing::Truly(
                          [](float x) { return numerics::bf16_to_float(numerics::round_to_bf16(x)) != x; })))
        << name;
  }
}

TEST_P(Fp32Weights, AreSavedLoadedAndMoved) {
  ToyOptions o = with_fp32_vectors(GetParam(), StateFormat::byte_moments);
  o.steps = 4;
  const std::string expected = train_toy(o).digest;
  const std::filesystem::path folder =
      std::filesystem::path(::testing::TempDir()) / (std::string("fp32-") + GetParam());
  std::filesystem::remove_all(folder);
  ToyResult ignored;
  {
    ToyTrainer t(o);
    for (int s = 0; s < 2; ++s) t.step(s, ignored);
    t.engine().save(folder);
  }
  ToyTrainer t(with_fp32_vectors("static:0.5", StateFormat::byte_moments));
  t.engine().load(folder);
  for (int s = 2; s < 4; ++s) t.step(s, ignored);
  EXPECT_EQ(t.engine().state_digest(), expected);
}

TEST_P(Fp32Weights, KeepTheirBitsUnderAnotherPlan) {
  ToyOptions o = with_fp32_vectors(GetParam(), StateFormat::split);
  o.steps = 4;
  const std::string expected = train_toy(o).digest;
  o.offload.spare_device_memory = o.offload.spare_host_memory = std::size_t{8} << 20;
  ToyTrainer t(o);
  ToyResult ignored;
  for (const char* next : {"host", "stream", "interleave:2", "static:0.5"}) {
    const int s = static_cast<int>(t.engine().step());
    t.step(s, ignored);
    OffloadOptions other = o.offload;
    other.policy = parse_policy(next);
    other.spare_device_memory = other.spare_host_memory = 0;
    other.max_micro_batches = 1;
    t.engine().adopt(make_plan(t.layout(), other, {o.device.capacity, 0}));
  }
  EXPECT_EQ(t.engine().state_digest(), expected);
}

INSTANTIATE_TEST_SUITE_P(Policies, Fp32Weights,
                         ::testing::Values("device", "host", "stream", "static:0.5", "interleave:2"));

TEST(Fp32WeightsInAPlan, TakeFourBytes) {
  ToyOptions o = toy("host");
  const ParameterLayout narrow = testing::toy_layout(o);
  o.vectors = DType::f32;
  const ParameterLayout layout = testing::toy_layout(o);
  const Layer& layer = layout.layer(2);
  EXPECT_EQ(layer.fp32_elements, 1024);
  EXPECT_EQ(layer.weight_offset(layer.elements), narrow.layer(2).weight_offset(narrow.layer(2).elements) + 2 * 2048);
  EXPECT_EQ(layer.weight_offset(layer.parameters[1].offset), layer.weight_offset(layer.elements) - 4 * 1024)
      << "frozen";
  EXPECT_EQ(layer.parameters[0].offset, 0);
  EXPECT_NE(layout.storage_hash(), narrow.storage_hash());
  EXPECT_EQ(slice_of(layer, {0, 2}).trained.begin, 0);
  EXPECT_GE(slice_of(layer, {1, 2}).trained.begin, layer.fp32_elements);
  o.offload.resident_layers = 0;
  const Plan plan = make_plan(layout, o.offload, {o.device.capacity, 0});
  EXPECT_GE(plan.size_classes[static_cast<std::size_t>(plan.layers[2].size_class)].weight_bytes,
            layer.weight_offset(layer.elements));
  EXPECT_THAT(plan.json(), ::testing::HasSubstr("weight_bytes"));
}

TEST(Fp32WeightsMisuse, IsRefusedWithTheParameter) {
  ParameterLayout layout;
  auto layer = layout.add_layer("a");
  EXPECT_THROW(layer.add("w", {4}, {.gradient = DType::bf16, .weight = DType::f32}), MisuseError);
  EXPECT_THROW(layer.add("w", {4}, {.weight = DType::i32}), MisuseError);
  layer.add("w", {4}, {.weight = DType::f32});
  layout.add_layer("b").add("w", {4});
  EXPECT_THROW(layout.tie("a.w", "b.w"), MisuseError);
}

}  // namespace
}  // namespace tandem
