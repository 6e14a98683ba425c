// The reference of DPO in the step that trains adapters has the bits of forward passes beforehand, takes no memory but
// for adapters of its own, and changes nothing else.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>

#include "core/numerics/bf16.hpp"
#include "core/numerics/preference.hpp"
#include "core/numerics/random.hpp"
#include "models/transformer/adapter_modules.hpp"
#include "models/transformer/reference_adapters.hpp"
#include "tests/models/rig.hpp"

namespace tandem::testing {
namespace {

constexpr std::int64_t sequences = 4, tokens_each = 9;

/// Each module has an adapter.
ModelConfig with_adapters(ModelConfig config, double dropout = 0.0) {
  LoraConfig lora{.rank = 3, .alpha = 6.0, .dropout = dropout, .seed = 5};
  for (std::int64_t block = 0; block < config.layers; ++block) {
    auto& modules = lora.modules.emplace_back();
    for (const AdapterModule& of : adapter_modules(config)) {
      if (of.name == "mlp.experts.gate_up_proj") continue;  // its halves have one each
      modules.push_back({.name = of.name, .rank = lora.rank, .alpha = lora.alpha, .each_expert = of.experts() > 0});
    }
  }
  config.lora = lora;
  return config;
}

ParameterLayout over_a_frozen_base(const ModelConfig& config) {
  const ParameterLayout plain = layout_of(config, DType::f32);
  ParameterLayout frozen;
  for (const Layer& layer : plain.layers()) {
    auto builder = frozen.add_layer(layer.name);
    for (const Parameter& p : layer.parameters) {
      ParameterOptions options = p.options;
      if (!p.tied()) options.trainable = is_adapter(p);
      builder.add(p.name, p.shape, options);
    }
  }
  if (config.tied_head) frozen.tie("embedding.tokens", "head.lm_head");
  return frozen;
}

/// Adapters as training leaves them, whose B is not zero.
void leave_step_0(Rig& rig) {
  for (const Parameter* p : rig.parameters().layout().owned_parameters()) {
    if (!is_adapter(*p)) continue;
    std::vector<float> values(static_cast<std::size_t>(p->count));
    for (std::size_t i = 0; i < values.size(); ++i) {
      const auto word = numerics::philox_block(9, std::hash<std::string>{}(p->full_name), i).word[0];
      values[i] = (static_cast<float>(word % 257U) - 128.0F) / 512.0F;
    }
    rig.parameters().set(*p, values);
  }
}

/// Values of adapters that training goes on from. Some lie in the middle of two weights, of which the one farther from
/// zero is taken.
std::vector<float> first_values(const Parameter& p) {
  std::vector<float> values(static_cast<std::size_t>(p.count));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto word = numerics::philox_block(11, std::hash<std::string>{}(p.full_name), i).word[0];
    const auto value = (static_cast<float>(word % 257U) - 128.0F) / 512.0F;
    values[i] =
        i % 3 == 0 ? std::bit_cast<float>((std::bit_cast<std::uint32_t>(value) & 0xFFFF0000U) | 0x8000U) : value;
  }
  return values;
}

void begin_with_adapters(Rig& rig) {
  for (const Parameter* p : rig.parameters().layout().owned_parameters()) {
    if (is_adapter(*p)) rig.parameters().set(*p, first_values(*p));
  }
}

void write_reference_adapters(Rig& rig) {
  for (const auto& block : rig.model().reference_adapters()->blocks()) {
    for (const ReferenceAdapters::Matrix& matrix : block) {
      const std::vector<float> values = first_values(rig.parameters().layout().parameter(matrix.full_name));
      std::vector<bf16> weights(values.size());
      std::ranges::transform(values, weights.begin(), numerics::weight_of_master);
      rig.device().copy(matrix.values.data, weights.data(), matrix.values.bytes(), CopyKind::host_to_device,
                        rig.stream());
      rig.device().synchronize(rig.stream());
    }
  }
}

/// Ids that every model here has.
std::vector<std::int32_t> ids_from(std::int32_t first) {
  std::vector<std::int32_t> ids = ramp(sequences * tokens_each, first);
  for (std::int32_t& id : ids) id %= 61;
  return ids;
}

std::vector<std::int32_t> targets_from(std::int64_t prompt, std::int32_t first) {
  std::vector<std::int32_t> targets = ids_from(first);
  for (std::int64_t i = 0; i < sequences * tokens_each; ++i) {
    if (i % tokens_each < prompt) targets[static_cast<std::size_t>(i)] = -1;
  }
  return targets;
}

void set_micro_batch(Rig& rig, std::int64_t micro, std::int64_t at) {
  const auto first = static_cast<std::int32_t>(31 * micro);
  rig.set_batch(ids_from(first), targets_from(3 + micro, first + 7), at);
  rig.model().set_draw(at, static_cast<std::uint64_t>(40 + micro));
}

RunShape shape_of_pairs() { return {.batch = sequences, .sequence = tokens_each, .preference_beta = 0.3F}; }

/// Log-probabilities of a micro-batch under the adapters of step 0: those that are new, or those that are gone on from.
std::vector<float> beforehand(const ModelConfig& config, RunShape shape, std::int64_t micro, bool goes_on) {
  shape.micro_batches = 1;
  Rig rig(config, shape, over_a_frozen_base(config));
  rig.load_random(3);
  if (goes_on) begin_with_adapters(rig);
  set_micro_batch(rig, micro, 0);
  rig.set_reference(std::vector<float>(sequences));
  const std::vector<float> losses = rig.evaluate();
  std::vector<float> scores;
  for (std::int64_t i = 0; i < sequences; ++i)
    scores.push_back(-numerics::sum_of_losses(losses.data() + i * tokens_each, tokens_each));
  return scores;
}

/// All that a step leaves.
struct Outcome {
  std::vector<float> losses;
  std::vector<std::vector<float>> pairs, reference;
  std::vector<Gradients> gradients;
  PlainParameters::Log log;
  std::size_t carved = 0;
};

Outcome outcome(const ModelConfig& config, const RunShape& shape, const std::vector<std::vector<float>>& reference) {
  Rig rig(config, shape, over_a_frozen_base(config));
  rig.load_random(3);
  leave_step_0(rig);
  if (shape.reference_adapters) write_reference_adapters(rig);
  for (std::int64_t i = 0; i < shape.micro_batches; ++i) {
    set_micro_batch(rig, i, i);
    rig.set_reference(reference[static_cast<std::size_t>(i)], i);
  }
  Outcome made;
  made.carved = rig.carved();
  made.losses = rig.train(0.5F, shape.micro_batches);
  made.log = rig.parameters().log();
  for (std::int64_t i = 0; i < shape.micro_batches; ++i) {
    made.pairs.push_back(rig.pairs(i));
    made.reference.push_back(rig.reference(i));
    made.gradients.push_back(rig.gradients(static_cast<std::size_t>(i)));
  }
  return made;
}

struct Way {
  const char* name;
  std::function<void(const ModelConfig&, RunShape&)> set;
};
const std::vector<Way>& ways() {
  static const std::vector<Way> all{
      {"kept", [](const ModelConfig&, RunShape&) {}},
      {"bf16", [](const ModelConfig&, RunShape& s) { s.compute = DType::bf16; }},
      {"selective", [](const ModelConfig&, RunShape& s) { s.selective = true; }},
      {"recomputed", [](const ModelConfig& c, RunShape& s) { s.recomputed_blocks = c.layers, s.micro_batches = 2; }},
      {"mixed", [](const ModelConfig&, RunShape& s) { s.recomputed_blocks = 1, s.selective = true; }},
      {"at once", [](const ModelConfig&, RunShape& s) { s.micro_batches = 3; }},
      {"offloaded",
       [](const ModelConfig& c, RunShape& s) { s.recomputed_blocks = c.layers, s.offload_inputs = true; }}};
  return all;
}

class ReferenceInStep : public ::testing::TestWithParam<std::string> {
 protected:
  ModelConfig model() const { return GetParam().starts_with("tiny") ? tiny(GetParam()) : Fixture(GetParam()).config(); }
};

/// `goes_on`: from adapters, of which the reference has a copy.
void compare_ways(const ModelConfig& config, RunShape shape, bool goes_on) {
  std::vector<std::vector<float>> scores, unknown;
  for (std::int64_t i = 0; i < shape.micro_batches; ++i) {
    scores.push_back(beforehand(config, shape, i, goes_on));
    unknown.emplace_back(sequences, std::numeric_limits<float>::quiet_NaN());
  }
  const Outcome before = outcome(config, shape, scores);
  shape.reference_in_step = true;
  shape.reference_adapters = goes_on;
  const Outcome step = outcome(config, shape, unknown);
  EXPECT_EQ(step.reference, scores);
  EXPECT_EQ(step.losses, before.losses);
  EXPECT_EQ(step.pairs, before.pairs);
  EXPECT_EQ(step.gradients, before.gradients);
  EXPECT_EQ(step.log, before.log) << "the engine sees another step";
  EXPECT_EQ(step.carved > before.carved, goes_on) << "a copy takes memory, and nothing else does";
  for (const auto& pairs : step.pairs) EXPECT_NE(pairs[1], 0.0F) << "the model is its reference";
}

TEST_P(ReferenceInStep, HasTheBitsOfForwardsBeforehandAndChangesNothingElse) {
  const ModelConfig config = with_adapters(model(), 0.25);
  for (const Way& way : ways()) {
    SCOPED_TRACE(way.name);
    RunShape shape = shape_of_pairs();
    way.set(config, shape);
    compare_ways(config, shape, /*goes_on=*/false);
    compare_ways(config, shape, /*goes_on=*/true);
  }
}

// The base itself, whose GELU may be computed with the product before it: other bits, the same number.
TEST_P(ReferenceInStep, IsTheBaseWithoutAdapters) {
  const ModelConfig base = model(), config = with_adapters(base);
  RunShape shape = shape_of_pairs();
  Rig plain(base, shape);
  plain.load_random(3);
  set_micro_batch(plain, 0, 0);
  plain.set_reference(std::vector<float>(sequences));
  const std::vector<float> losses = plain.evaluate();
  shape.reference_in_step = true;
  const std::vector<float> scores = outcome(config, shape, {std::vector<float>(sequences)}).reference.front();
  for (std::int64_t i = 0; i < sequences; ++i) {
    const float expected = -numerics::sum_of_losses(losses.data() + i * tokens_each, tokens_each);
    EXPECT_NEAR(scores[static_cast<std::size_t>(i)], expected, 1e-5 * std::abs(expected)) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Models, ReferenceInStep,
                         ::testing::Values("tiny-gpt2", "tiny-llama", "olmo2", "gemma3", "granite", "qwen3_moe"),
                         [](const auto& instance) {
                           std::string name = instance.param;
                           std::ranges::replace(name, '-', '_');
                           return name;
                         });

TEST(ReferenceInStepShape, NeedsAdaptersAndPreferences) {
  RunShape shape = shape_of_pairs();
  shape.reference_in_step = true;
  EXPECT_THROW(Transformer(tiny("tiny-gpt2"), shape), MisuseError);
  shape.preference_beta = 0.0F;
  EXPECT_THROW(Transformer(with_adapters(tiny("tiny-gpt2")), shape), MisuseError);
  shape = shape_of_pairs();
  shape.reference_adapters = true;
  EXPECT_THROW(Transformer(with_adapters(tiny("tiny-gpt2")), shape), MisuseError);
}

}  // namespace
}  // namespace tandem::testing
