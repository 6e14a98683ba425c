// Frozen weights in other formats: they are stored and sent so, and whoever fetches their layer sees their values.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "core/base/error.hpp"
#include "core/params/state_digest.hpp"
#include "core/params/weight_encoder.hpp"
#include "offload/engine/state_io.hpp"
#include "tests/offload/planned_traffic.hpp"
#include "tests/offload/ranks/toy_group.hpp"

namespace tandem {
namespace {

using testing::toy;
using testing::ToyOptions;
using testing::ToyResult;
using testing::ToyTrainer;

constexpr WeightCode coded_formats[] = {WeightCode::int8, WeightCode::nf4, WeightCode::nf4_double, WeightCode::fp8};

std::string name_of_code(WeightCode code) {
  static const char* const names[] = {"none", "int8", "nf4", "nf4_double", "fp8"};
  return names[static_cast<int>(code)];
}

/// Codes and scales as they are stored.
struct Stored final : CodeSink {
  std::vector<std::byte> all_codes;
  std::vector<float> all_scales;
  void codes(std::int64_t first, std::span<const std::byte> bytes) override {
    EXPECT_LE(first, std::ssize(all_codes) * 2);
    all_codes.insert(all_codes.end(), bytes.begin(), bytes.end());
  }
  void scales(std::int64_t first, std::span<const float> floats) override {
    EXPECT_EQ(first, std::ssize(all_scales));
    all_scales.insert(all_scales.end(), floats.begin(), floats.end());
  }
};

Stored stored_form(const Parameter& p, std::span<const float> values) {
  Stored stored;
  WeightEncoder encoder(p.options.code, p.coded_shape(), p.full_name, stored);
  encoder.add(values);
  encoder.finish();
  return stored;
}

/// Values that the toy trainer initializes a parameter with.
std::vector<float> initial(const ToyOptions& o, const Parameter& p) {
  std::vector<float> values(static_cast<std::size_t>(p.count));
  const std::uint64_t key = o.seed + std::hash<std::string>{}(p.full_name);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = 0.1F * testing::noise(key, i);
  return values;
}

ToyOptions coded(const std::string& policy, WeightCode code) {
  ToyOptions o = toy(policy);
  o.code = code;
  o.offload.subgroup_size = 2048;
  return o;
}

/// A parameter's weights as a guard has them, in fp32.
std::vector<float> seen(ToyTrainer& t, int layer, const std::string& name) {
  const auto scope = t.engine().evaluation();
  const WeightsGuard guard = t.engine().fetch(layer, t.stream());
  const TensorView view = guard[name];
  EXPECT_EQ(view.dtype, DType::bf16);
  std::vector<bf16> bits(static_cast<std::size_t>(view.count()));
  t.device().copy(bits.data(), view.data, view.bytes(), CopyKind::device_to_host, t.stream());
  t.device().synchronize(t.stream());
  std::vector<float> values;
  for (const bf16 x : bits) values.push_back(numerics::bf16_to_float(x));
  return values;
}

/// Hash of a small frozen parameter that is not coded, as the state digest has it.
std::string hash_of_values(ToyTrainer& t, const Parameter& p) {
  StateDigest digest;
  digest.begin_parameter(p.full_name);
  std::vector<float> values(static_cast<std::size_t>(p.count));
  for (const StateArray array : state_arrays) {
    t.engine().read(p, array, values);
    digest.add(values.data(), p.count);
    digest.end_array();
  }
  digest.end_parameter();
  return digest.parameter_hash();
}

class CodedWeightsUnder : public ::testing::TestWithParam<std::tuple<const char*, WeightCode>> {
 protected:
  std::string policy() const { return std::get<0>(GetParam()); }
  WeightCode code() const { return std::get<1>(GetParam()); }
};

TEST_P(CodedWeightsUnder, TheirValuesAreThoseOfTheirCodes) {
  const ToyOptions o = coded(policy(), code());
  ToyTrainer t(o);
  for (const char* layer : {"h.0", "h.3", "h.1"}) {
    const Parameter& p = t.layout().parameter(std::string(layer) + ".base");
    const Stored stored = stored_form(p, initial(o, p));
    std::vector<float> expected(static_cast<std::size_t>(p.count));
    decode_range(code(), p.coded_shape(), stored.all_codes.data(), stored.all_scales.data(), 0, expected);
    for (float& x : expected) x = numerics::bf16_to_float(numerics::round_to_bf16(x));
    EXPECT_EQ(seen(t, p.layer, "base"), expected) << layer;
  }
}

TEST_P(CodedWeightsUnder, OneDigestWhereverTheyLie) {
  const ToyResult expected = train_toy(coded("device", code()));
  for (const int resident : {0, 2, 4}) {
    for (const int prefetch : {1, 3}) {
      ToyOptions o = coded(policy(), code());
      if (policy() != "device") {
        o.offload.resident_layers = resident;
        o.offload.prefetch_layers = prefetch;
      }
      o.evaluate_between = resident == 2;
      o.offload.poison_released = resident == 0;
      const ToyResult result = train_toy(o);
      EXPECT_EQ(result.digest, expected.digest) << resident;
      if (!o.evaluate_between) {
        EXPECT_EQ(result.losses, expected.losses) << resident;
      }
      EXPECT_EQ(result.device_peak, result.plan.memory.device_bytes());
    }
  }
}

TEST_P(CodedWeightsUnder, RanksHaveTheBitsOfOne) {
  ToyOptions o = coded(policy(), code());
  o.micro_batches = 6;
  const std::string expected = train_toy(o).digest;
  for (const int ranks : {2, 3}) {
    for (const ToyResult& result : testing::train_toy_group(o, ranks)) EXPECT_EQ(result.digest, expected) << ranks;
  }
}

TEST_P(CodedWeightsUnder, TheDigestHasTheHashesOfTheirCodes) {
  ToyTrainer t(coded(policy(), code()));
  std::map<std::string, std::string> hashes;
  for (const Parameter* p : t.layout().owned_parameters()) {
    if (p->coded()) hashes[p->full_name] = t.engine().code_hash(*p);
    if (!p->coded() && !p->options.trainable) hashes[p->full_name] = hash_of_values(t, *p);
  }
  OffloadEngine* const engine = &t.engine();
  EXPECT_EQ(digest_over_base({&engine, 1}, hashes), t.engine().state_digest());
}

INSTANTIATE_TEST_SUITE_P(Policies, CodedWeightsUnder,
                         ::testing::Combine(::testing::Values("device", "host", "stream", "interleave:2"),
                                            ::testing::ValuesIn(coded_formats)),
                         [](const auto& of) {
                           std::string policy = std::get<0>(of.param);
                           std::ranges::replace(policy, ':', '_');
                           return policy + "_" + name_of_code(std::get<1>(of.param));
                         });

TEST(CodedWeights, CrossTheLinkAsCodes) {
  ToyOptions plain = toy("host");
  plain.offload.resident_layers = 0;
  const ParameterLayout without = testing::toy_layout(plain);
  for (const WeightCode code : coded_formats) {
    ToyOptions o = plain;
    o.code = code;
    const ParameterLayout layout = testing::toy_layout(o);
    const Layer& layer = layout.layer(3);
    const Parameter& p = layout.parameter("h.1.base");
    const std::int64_t scales = scale_floats(code, p.coded_shape());
    const std::int64_t padded_scales = (scales + layout_quantum - 1) / layout_quantum * layout_quantum;
    const auto added = layer.weight_offset(layer.elements) - without.layer(3).weight_offset(without.layer(3).elements);
    EXPECT_EQ(added, static_cast<std::size_t>(p.padded_count * code_bits(code) / 8 + padded_scales * 4));
    const ToyResult result = train_toy(o);
    const Traffic traffic = testing::planned_traffic(layout, result.plan, o.micro_batches, o.steps);
    EXPECT_EQ(result.counters.bytes_host_to_device, traffic.host_to_device) << name_of_code(code);
    Lowering lowering(layout, result.plan);
    TaskList tasks;
    lowering.begin_step({});
    lowering.use(LayerIndex(3), tasks);
    const auto fetch = std::ranges::find(tasks, TaskKind::fetch_weights, &Task::kind);
    ASSERT_NE(fetch, tasks.end());
    EXPECT_EQ(fetch->bytes, layer.weight_offset(layer.elements)) << name_of_code(code);
  }
}

TEST(CodedWeights, ABufferToDecodeIntoIsInThePlan) {
  ToyOptions o = coded("host", WeightCode::nf4);
  const Plan plan = make_plan(testing::toy_layout(o), o.offload, {o.device.capacity, 0});
  EXPECT_THAT(plan.table(), ::testing::HasSubstr("weights, decoded"));
  o.code = WeightCode::none;
  EXPECT_THAT(make_plan(testing::toy_layout(o), o.offload, {o.device.capacity, 0}).table(),
              ::testing::Not(::testing::HasSubstr("weights, decoded")));
}

TEST(CodedWeights, TwoLayersAreNotHeldAtOnce) {
  ToyTrainer t(coded("stream", WeightCode::int8));
  const auto scope = t.engine().evaluation();
  const int first = t.layout().parameter("h.0.base").layer;
  {
    const WeightsGuard guard = t.engine().fetch(first, t.stream());
    const WeightsGuard other = t.engine().fetch(0, t.stream());  // has none
    EXPECT_THROW((void)t.engine().fetch(first + 1, t.stream()), MisuseError);
  }
  EXPECT_NO_THROW((void)t.engine().fetch(first + 1, t.stream()));
}

TEST(CodedWeights, AreWrittenAsCodesInOrder) {
  const ToyOptions o = coded("interleave:2", WeightCode::nf4);
  ToyTrainer t(o);
  const Parameter& p = t.layout().parameter("h.2.base");
  const std::string before = t.engine().state_digest();
  const Stored stored = stored_form(p, initial(o, p));
  CodeSink& sink = t.engine().write_codes(p);
  EXPECT_THROW((void)t.engine().state_digest(), MisuseError) << "codes that are not there";
  EXPECT_THROW(sink.codes(2, stored.all_codes), MisuseError) << "a gap";
  const auto half = std::span(stored.all_codes).first(5000);
  sink.codes(0, half);
  sink.codes(10000, std::span(stored.all_codes).subspan(5000));
  EXPECT_THROW(sink.codes(p.count, half), MisuseError) << "more than there are";
  sink.scales(0, stored.all_scales);
  EXPECT_EQ(t.engine().state_digest(), before);
  std::vector<std::byte> other = stored.all_codes;
  other[77] ^= std::byte{1};
  CodeSink& again = t.engine().write_codes(p);
  again.scales(0, stored.all_scales);
  again.codes(0, other);
  EXPECT_NE(t.engine().state_digest(), before);
  std::vector<float> scales = stored.all_scales;
  scales.back() *= 2.0F;
  CodeSink& with_other_scales = t.engine().write_codes(p);
  with_other_scales.codes(0, stored.all_codes);
  with_other_scales.scales(0, scales);
  EXPECT_NE(t.engine().state_digest(), before);
}

TEST(CodedWeights, TheirValuesAreNeitherReadNorWritten) {
  ToyTrainer t(coded("host", WeightCode::fp8));
  const Parameter& p = t.layout().parameter("h.2.base");
  std::vector<float> values(static_cast<std::size_t>(p.count));
  EXPECT_THROW(t.engine().read(p, StateArray::master, values), MisuseError);
  EXPECT_THROW(t.engine().write(p, StateArray::master, values), MisuseError);
  EXPECT_THROW((void)t.engine().write_codes(t.layout().parameter("h.2.frozen")), MisuseError);
}

TEST(CodedWeights, StayThemselvesUnderAnotherPlan) {
  for (const WeightCode code : coded_formats) {
    ToyOptions o = coded("host", code);
    o.offload.spare_device_memory = o.offload.spare_host_memory = std::size_t{8} << 20;
    o.offload.resident_layers = 0;
    ToyTrainer t(o);
    const int layer = t.layout().parameter("h.1.base").layer;
    const std::vector<float> before = seen(t, layer, "base");
    OffloadOptions others = o.offload;
    for (const int resident : {6, 2, 0}) {
      others.resident_layers = resident;
      t.engine().adopt(make_plan(t.layout(), others, {o.device.capacity, 0}));
      EXPECT_EQ(seen(t, layer, "base"), before) << name_of_code(code) << ", " << resident;
    }
  }
}

TEST(CodedWeights, AreFrozenMatrices) {
  ParameterLayout layout;
  auto layer = layout.add_layer("a");
  EXPECT_THROW(layer.add("trained", {4, 4}, {.code = WeightCode::nf4}), MisuseError);
  EXPECT_THROW(layer.add("vector", {4}, {.trainable = false, .code = WeightCode::nf4}), MisuseError);
  EXPECT_THROW(layer.add("whole", {4, 4}, {.trainable = false, .weight = DType::f32, .code = WeightCode::nf4}),
               MisuseError);
  layer.add("x", {4, 4}, {.trainable = false, .code = WeightCode::nf4});
  layer.add("y", {4, 4}, {.trainable = false});
  EXPECT_THROW(layout.tie("a.x", "a.y"), MisuseError);
}

}  // namespace
}  // namespace tandem
