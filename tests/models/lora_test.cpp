// Adapters against PEFT in fp32: losses, every gradient, and ten steps over a frozen base.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>

#include "models/transformer/adapter_modules.hpp"
#include "tests/models/rig.hpp"

namespace tandem::testing {
namespace {

constexpr double lora_bar = 1e-5, step_bar = 1e-4;  // bounds for whole models

/// A base with the adapter that PEFT made for it. `name`: that of the base, or with a dot and a word behind it.
struct Adapted {
  Fixture base, adapter;
  ModelConfig config;
  nlohmann::json described;
  explicit Adapted(const std::string& name)
      : base(name.substr(0, name.find('.'))),
        adapter("lora/" + name),
        config(base.config()),
        described(nlohmann::json::parse(adapter.metadata("adapter"))) {
    config.lora = LoraConfig{
        .rank = described.at("r"), .alpha = described.at("lora_alpha"), .rank_stabilized = described.at("use_rslora")};
    config.lora->modules.resize(static_cast<std::size_t>(config.layers));
    for (std::int64_t block = 0; block < config.layers; ++block) {
      for (const AdapterModule& module : adapter_modules(config)) find_module(block, module);
    }
  }

  /// Adds the adapter of a module, where the file has one.
  void find_module(std::int64_t block, const AdapterModule& module) {
    const std::int64_t experts = module.experts();
    if (experts > 0) {
      const std::string both = "base_model.model." + module_in_transformers(config, block, module);
      const std::string outer = both.substr(0, both.rfind('.')), inner = outer + ".base_layer";
      const bool is_down = module.name.ends_with("down_proj"), is_gate_up = module.name.ends_with("gate_up_proj");
      const std::string wrapper = is_gate_up && adapter.has(inner + std::string(lora_a)) ? inner : outer;
      if (is_down || is_gate_up) add(block, module, wrapper, experts);
      if (is_gate_up) return;  // files have a module for each half
    }
    add(block, module, "base_model.model." + module_in_files(config, block, module, 0), 0);
  }
  void add(std::int64_t block, const AdapterModule& module, const std::string& prefix, std::int64_t experts) {
    const std::string name = prefix + std::string(lora_a);
    if (!adapter.has(name) || adapter[name].shape[1] != module.inputs()) return;
    const std::string last = module.name.substr(module.name.rfind('.') + 1);
    const nlohmann::json& alphas = described.at("alpha_pattern");
    config.lora->modules.at(static_cast<std::size_t>(block))
        .push_back({.name = module.name,
                    .rank = adapter[name].shape[0] / std::max<std::int64_t>(1, experts),
                    .alpha = alphas.value(last, alphas.value(".*\\." + last, config.lora->alpha)),
                    .each_expert = module.experts() > 0 && experts == 0});
  }

  /// PEFT's tensors of a parameter.
  std::vector<PeftTensor> tensors_of(const Parameter& p) const {
    if (is_adapter(p)) return adapter_tensors(config, p);
    const HfTensor tensor = hf_tensor_of(config, p);
    return {{.name = "base_model.model." + tensor.name, .shape = {p.shape[0], p.shape[1]}, .count = p.count}};
  }
  bool holds(const Parameter& p) const {
    return is_adapter(p) || (p.shape.rank() < 3 && adapter.has("base_model.model." + hf_tensor_of(config, p).name));
  }
  std::vector<float> values(const Parameter& p, const std::string& prefix = "") const {
    if (!holds(p)) return values_of(base, p);
    std::vector<float> values;
    for (const PeftTensor& tensor : tensors_of(p)) {
      const std::vector<float> stored = adapter[prefix + tensor.name].floats();
      for (std::int64_t i = 0; i < tensor.count; ++i) {
        values.push_back(stored.at(static_cast<std::size_t>(tensor.place(i))));
      }
    }
    return values;
  }
  /// Tensors that all parameters of the adapter are made of.
  std::size_t tensor_count(const ParameterLayout& layout) const {
    std::set<std::string> names;
    for (const Parameter* p : layout.owned_parameters()) {
      if (!holds(*p)) continue;
      for (const PeftTensor& tensor : tensors_of(*p)) names.insert(tensor.name);
    }
    return names.size();
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
  EXPECT_EQ(model.tensor_count(parameters().layout()), model.adapter.gradient_count())
      << "a gradient of the reference is not compared";
  const double worst = worst_gradient();
  EXPECT_LE(worst, lora_bar);
  RecordProperty("worst", std::to_string(worst * 1e6) + "e-6");
}

/// An adapter that PEFT trains as it is stored.
class StepsAgainstPeft : public AgainstPeft {};

TEST_P(StepsAgainstPeft, TenStepsAgree) {
  const double worst = worst_step();
  EXPECT_LE(worst, step_bar);
  RecordProperty("worst", std::to_string(worst * 1e6) + "e-6");
}

TEST_P(StepsAgainstPeft, AnotherLearningRateIsFound) { EXPECT_GT(worst_step(1.1), step_bar); }

TEST_P(AgainstPeft, AnotherScaleIsFound) {
  for (auto& modules : model.config.lora->modules) {
    for (LoraModule& module : modules) module.alpha *= 1.01;
  }
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

std::string plain_name(const ::testing::TestParamInfo<std::string>& instance) {
  std::string name = instance.param;
  std::ranges::replace(name, '.', '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(Models, StepsAgainstPeft,
                         ::testing::Values("gpt2", "llama3", "qwen3", "gemma3", "qwen3_moe", "phi3", "mixtral", "olmoe",
                                           "qwen3_moe.router", "olmoe.router"),
                         plain_name);
INSTANTIATE_TEST_SUITE_P(Models, AgainstPeft,
                         ::testing::Values("gpt2", "llama3", "qwen3", "gemma3", "qwen3_moe", "phi3", "mixtral", "olmoe",
                                           "qwen3_moe.modules", "qwen3_moe.router", "olmoe.router"),
                         plain_name);

}  // namespace
}  // namespace tandem::testing
