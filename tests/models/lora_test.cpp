// Adapters against PEFT in fp32: losses, every gradient, and ten steps over a frozen base.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>

#include "tests/models/rig.hpp"

namespace tandem::testing {
namespace {

constexpr double lora_bar = 1e-5, step_bar = 1e-4;  // as of whole models

/// A base with the adapter that PEFT made for it.
struct Adapted {
  Fixture base, adapter;
  ModelConfig config;
  explicit Adapted(const std::string& name) : base(name), adapter("lora/" + name), config(base.config()) {
    const auto described = nlohmann::json::parse(adapter.metadata("adapter"));
    config.lora = LoraConfig{.rank = described.at("r"),
                             .alpha = described.at("lora_alpha"),
                             .rank_stabilized = described.at("use_rslora"),
                             .modules = {}};
    for (std::int64_t block = 0; block < config.layers; ++block) {
      auto& modules = config.lora->modules.emplace_back();
      for (const LinearLayer& layer : linear_layers(config)) {
        const char* const blocks = config.family == Family::gpt2 ? "transformer.h." : "model.layers.";
        const std::string name_of_a = "base_model.model." + (blocks + std::to_string(block)) + "." + layer.module;
        if (adapter.has(name_of_a + std::string(lora_a))) modules.push_back(layer.module);
      }
    }
  }

  /// PEFT's name of a parameter's tensor.
  std::string name_of(const Parameter& p) const {
    const HfTensor tensor = hf_tensor_of(config, p);
    return is_adapter(p) ? tensor.name : "base_model.model." + tensor.name;
  }
  bool holds(const Parameter& p) const { return p.shape.rank() < 3 && adapter.has(name_of(p)); }
  std::vector<float> values(const Parameter& p, const std::string& prefix = "") const {
    if (!holds(p)) return values_of(base, p);
    return adapter[prefix + name_of(p)].floats(hf_tensor_of(config, p).transposed);
  }

  /// The layout with everything but the adapter and what is saved with it frozen.
  ParameterLayout layout() const {
    const ParameterLayout plain = layout_of(config, DType::f32);
    ParameterLayout frozen;
    for (const Layer& layer : plain.layers()) {
      auto builder = frozen.add_layer(layer.name);
      for (const Parameter& p : layer.parameters) {
        ParameterOptions options = p.options;
        if (!p.tied()) options.trainable = holds(p);
        builder.add(p.name, p.shape, options);
      }
    }
    if (config.tied_head) frozen.tie("embedding.tokens", "head.lm_head");
    return frozen;
  }
};

double largest_of(const std::vector<float>& values) {
  double most = 0.0;
  for (const float x : values) most = std::max(most, std::abs(static_cast<double>(x)));
  return most;
}

class AgainstPeft : public ::testing::TestWithParam<std::string> {
 protected:
  Adapted model{GetParam()};
  Rig rig{model.config, shape_of(model.adapter, false), model.layout()};

  void SetUp() override {
    for (const Parameter* p : parameters().layout().owned_parameters()) parameters().set(*p, model.values(*p));
  }
  PlainParameters& parameters() { return rig.parameters(); }
  std::vector<float> train(const std::string& prefix, std::size_t step, std::size_t each, double scale) {
    const auto part = [&](const char* name) {
      const std::vector<std::int32_t> all = model.adapter[prefix + name].as<std::int32_t>();
      const auto first = all.begin() + static_cast<std::ptrdiff_t>(step * each);
      return std::vector<std::int32_t>(first, first + static_cast<std::ptrdiff_t>(each));
    };
    rig.set_batch(part("tokens"), part("targets"));
    return rig.train(static_cast<float>(scale));
  }
  /// Largest difference of any gradient, in units of max(its largest, 1e-3 of the largest of all).
  double worst_gradient() {
    double overall = 0.0, worst = 0.0;
    const auto trained = parameters().layout().owned_parameters();
    for (const Parameter* p : trained) {
      if (p->options.trainable) overall = std::max(overall, largest_of(model.values(*p, "grad.")));
    }
    for (const Parameter* p : trained) {
      if (!p->options.trainable) continue;
      const std::vector<float> expected = model.values(*p, "grad."), ours = parameters().gradient(*p);
      const double unit = std::max(largest_of(expected), 1e-3 * overall);
      for (std::size_t i = 0; i < expected.size(); ++i) {
        const double off = std::abs(static_cast<double>(ours[i]) - static_cast<double>(expected[i])) / unit;
        worst = std::isnan(off) ? INFINITY : std::max(worst, off);
      }
    }
    return worst;
  }
  /// Largest relative difference of the loss of any of ten steps.
  double worst_step(double lr_factor = 1.0) {
    const FixtureOptimizer& o = model.adapter.optimizer();
    const AdamW adamw{.beta1 = o.beta1, .beta2 = o.beta2, .eps = o.eps, .weight_decay = o.weight_decay};
    const std::vector<double> expected = model.adapter["trajectory.losses"].as<double>();
    const std::vector<std::int32_t> targets = model.adapter["trajectory.targets"].as<std::int32_t>();
    const std::size_t each = targets.size() / expected.size();
    double worst = 0.0;
    for (std::size_t i = 0; i < expected.size(); ++i) {
      const auto batch = std::span(targets).subspan(i * each, each);
      const auto count = static_cast<double>(std::ranges::count_if(batch, [](std::int32_t t) { return t >= 0; }));
      const std::vector<float> losses = train("trajectory.", i, each, 1.0 / count);
      const double loss = std::accumulate(losses.begin(), losses.end(), 0.0) / count;
      worst = std::max(worst, std::abs(loss / expected[i] - 1.0));
      parameters().step(adamw, o.lr * lr_factor, o.clip);
    }
    return worst;
  }
};

TEST_P(AgainstPeft, LossesAndEveryGradientAgree) {
  const std::vector<float> expected = model.adapter["losses"].floats();
  const std::vector<float> losses = train("", 0, expected.size(), model.adapter.gradient_scale());
  ASSERT_EQ(losses.size(), expected.size());
  for (std::size_t i = 0; i < losses.size(); ++i) {
    EXPECT_NEAR(losses[i], expected[i], lora_bar * largest_of(expected));
  }
  std::size_t compared = 0;
  for (const Parameter* p : parameters().layout().owned_parameters()) compared += p->options.trainable ? 1 : 0;
  EXPECT_EQ(compared, model.adapter.gradient_count()) << "a gradient of the reference is not compared";
  const double worst = worst_gradient();
  EXPECT_LE(worst, lora_bar);
  RecordProperty("worst", std::to_string(worst * 1e6) + "e-6");
}

TEST_P(AgainstPeft, TenStepsAgree) {
  const double worst = worst_step();
  EXPECT_LE(worst, step_bar);
  RecordProperty("worst", std::to_string(worst * 1e6) + "e-6");
}

TEST_P(AgainstPeft, AnotherLearningRateIsFound) { EXPECT_GT(worst_step(1.1), step_bar); }

TEST_P(AgainstPeft, AnotherScaleIsFound) {
  model.config.lora->alpha *= 1.01;
  Rig other(model.config, shape_of(model.adapter, false), model.layout());
  for (const Parameter* p : other.parameters().layout().owned_parameters())
    other.parameters().set(*p, model.values(*p));
  const std::vector<float> expected = model.adapter["losses"].floats();
  other.set_batch(model.adapter["tokens"].as<std::int32_t>(), model.adapter["targets"].as<std::int32_t>());
  const std::vector<float> losses = other.train(model.adapter.gradient_scale());
  double off = 0.0;
  for (std::size_t i = 0; i < losses.size(); ++i) {
    off = std::max(off, std::abs(static_cast<double>(losses[i]) - static_cast<double>(expected[i])));
  }
  EXPECT_GT(off, lora_bar * largest_of(expected));
}

INSTANTIATE_TEST_SUITE_P(Models, AgainstPeft, ::testing::Values("gpt2", "llama3", "qwen3", "gemma3", "qwen3_moe"),
                         [](const auto& instance) { return instance.param; });

}  // namespace
}  // namespace tandem::testing
