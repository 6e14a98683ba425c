// Work by kinds of modules: its sums are what the plan of a step counts.
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "core/base/hash128.hpp"
#include "models/transformer/adapter_modules.hpp"
#include "train/hf/model_source.hpp"
#include "train/setup/fp8_work.hpp"
#include "train/setup/module_work.hpp"
#include "train/setup/performance.hpp"

namespace tandem {
namespace {

/// A run whose work is counted.
struct WorkCase {
  ModelConfig model;
  RunShape shape;
  SequenceFacts sequences{};
  std::optional<ParameterLayout> layout{};
};

/// Ways of keeping activations and of passing micro-batches, for sequences that every model has.
std::vector<RunShape> shapes_of(const ModelConfig& c) {
  const std::int64_t some = c.layers / 2, sequence = std::min<std::int64_t>(c.positions, 96);
  const RunShape plain{.batch = 2, .sequence = sequence};
  std::vector<RunShape> shapes(8, plain);
  shapes[1] = {.batch = 3, .sequence = sequence, .compute = DType::bf16, .recomputed_blocks = some};
  shapes[2] = {.batch = 2, .sequence = sequence, .recomputed_blocks = c.layers, .offload_inputs = true};
  shapes[3].selective = true;
  shapes[4] = {.batch = 2, .sequence = sequence, .recomputed_blocks = some, .selective = true};
  shapes[5] = {.batch = 2, .sequence = sequence, .micro_batches = 4, .compute = DType::bf16};
  shapes[6] = {.batch = 8, .sequence = std::min<std::int64_t>(c.positions, 1024), .compute = DType::bf16};
  shapes[7].preference_beta = 0.1F;
  return shapes;
}

WorkCase with_adapters(const ModelConfig& model, const RunShape& shape, WeightCode base) {
  TrainConfig config;
  config.lora.rank = 8;
  config.base = base;
  WorkCase made{.model = model, .shape = shape};
  made.model.lora = LoraConfig{.rank = 8, .alpha = 16.0};
  std::vector<LoraModule> modules;
  for (const AdapterModule& of : adapter_modules(model)) {
    if (is_router(of) || of.name == "mlp.experts.gate_up_proj") continue;  // whose halves have one each
    modules.push_back({.name = of.name, .rank = 8, .alpha = 16.0, .each_expert = of.experts() > 0});
  }
  made.model.lora->modules.assign(static_cast<std::size_t>(model.layers), modules);
  made.layout = trained_layout(config, made.model, ends_gradient(model, shape));
  return made;
}

std::vector<WorkCase> cases_of(const ModelConfig& model) {
  std::vector<WorkCase> cases;
  for (const RunShape& shape : shapes_of(model)) cases.push_back({.model = model, .shape = shape});
  cases.push_back(cases.front());
  cases.back().sequences.records = {{cases.back().shape.sequence / 2, 1.0}, {cases.back().shape.sequence / 4, 2.0}};
  cases.push_back(cases[5]);
  cases.back().layout = frozen_layout(model, "wte|embed_tokens|c_proj|down_proj|q_proj");
  for (const std::size_t shape : {1, 3, 5}) {
    for (const WeightCode base : {WeightCode::none, WeightCode::int8, WeightCode::nf4}) {
      cases.push_back(with_adapters(model, cases[shape].shape, base));
    }
  }
  return cases;
}

/// Hash of each figure of each layer of all cases, in whole FLOPs, bytes and kernels.
std::string digest_of(const ModelConfig& model) {
  Hash128 hash;
  for (const WorkCase& of : cases_of(model)) {
    const auto work = work_of(of.model, of.shape, of.sequences, of.layout ? &*of.layout : nullptr);
    for (const LayerWork& layer : work) {
      for (const PassWork& pass : {layer.forward, layer.backward}) {
        for (const double figure : {pass.matmul_flops, pass.attention_flops, pass.memory_bytes, 64.0 * pass.kernels}) {
          const auto whole = static_cast<std::int64_t>(std::llround(figure));
          hash.add(&whole, sizeof(whole));
        }
      }
    }
  }
  return hash.text();
}

/// A built-in model, or one with Granite's factor of what a block adds, which none of them has.
ModelConfig recorded_model(const std::string& name) {
  const std::string factor = " with a factor";
  ModelConfig c = builtin_model(name.substr(0, name.find(factor)));
  if (name.ends_with(factor)) c.residual_factor = 0.25;
  return c;
}

// Recorded before the work of a layer was divided into modules. A formula that changes on purpose changes these; the
// new ones are in the message.
TEST(ModuleWork, TheSumsAreWhatTheStepCounted) {
  const std::map<std::string, std::string> recorded{
      {"tiny-gpt2", "fb52e497aa7c794516d7a217f79db773"},
      {"tiny-llama", "fe9154316642ddf32a103c7ec6bd73c6"},
      {"tiny-llama with a factor", "0efeb3ca9ee36c71d136d36c007eb4e6"},
      {"tiny-moe", "ade029823239f0e3ed19b2200e1bbecb"},
      {"gpt2", "9ee5d52642dec5f9d54975057bbbf10c"},
      {"gpt2-medium", "6fb0dc6caa6100fa9223ce00664d8271"},
      {"gpt2-large", "e838da31aa56899f20e11e5ed980f7a0"},
      {"gpt2-xl", "760a872d406d1cbbb070fe6b56e19308"},
      {"llama3.2-1b", "c61f06e9e067c2dc57ccd6c62e0f1aaa"},
      {"llama3.2-3b", "e4ef4cab28d720648f2932ebf840ae82"},
      {"llama3.1-8b", "90c68aee7a3c0280dfbe26865ff07d83"},
      {"llama3.1-70b", "bee4cf3cae570070d0a4b98afd1e04fb"},
      {"qwen2.5-0.5b", "a5a66ec4f137035e92962089aac5e2c5"},
      {"qwen2.5-1.5b", "59c255a13f33eb938db9894466e3e3d2"},
      {"qwen2.5-7b", "03b180109ad75d1dba39908088a04352"},
      {"qwen3-0.6b", "37f87259d4ad71b7a243a443c8c84b04"},
      {"qwen3-1.7b", "0981bc9ce315fa25a55a5c57608318fe"},
      {"qwen3-4b", "0ff735d62ce8d548e1ec3dd1b1c9b2a8"},
      {"qwen3-8b", "e5725ff81f0f0313f40b2abf7ccbd275"},
      {"qwen3-14b", "65c4c31dbdca9cefeb287129c8f1cc0b"},
      {"qwen3-32b", "248f91e378ef1f06d56ff76c5c24eaec"},
      {"qwen3-30b-a3b", "2ddb98baa85f549d97fcc9a122c70a1c"},
      {"olmoe-1b-7b", "cf2515076f6f8dd1b2300fd49aac5a3e"},
      {"mixtral-8x7b", "94c1ac272e8eaed3c268f5d86353d0a4"},
      {"mistral-7b", "3474b854a19d5b0c7651497f5d37338c"},
      {"phi-3-mini", "1e41d57af931361aa5e599818e2b9e9e"},
      {"phi-4", "c54382d92a71c95c8181ed7492dd9c1d"},
      {"smollm3-3b", "7178a246c2835bbaffb807fb652282fb"},
      {"olmo2-7b", "17b4e179b33c0e1cf4648bb82d1d78e7"},
      {"olmo2-13b", "43e22412fccfb883f8ed3061fb6674a0"},
      {"gemma3-270m", "71f3e2a0a7f147e46a0ec9a77d6c960a"},
      {"gemma3-1b", "c6e00402d00610e2c00d9bb34b806e52"},
      {"gemma3-4b", "9513056d0850facc05e475e05ca9776b"},
      {"gemma3-12b", "cf77c499ad6d5b8cf32ebf8ac68fab6d"},
  };
  for (const auto& [name, digest] : recorded) EXPECT_EQ(digest_of(recorded_model(name)), digest) << name;
}

// Each part of the time is of one figure of the machine.
TEST(ModuleWork, ItsTimeIsThatOfTheStep) {
  MachineProfile profile;
  profile.matmul.value = 1e12;
  profile.attention.value = 5e11;
  profile.device_bandwidth.value = 1e11;
  profile.launch.value = 1e-6;
  for (const WorkCase& of : cases_of(builtin_model("tiny-moe"))) {
    const ParameterLayout* const layout = of.layout ? &*of.layout : nullptr;
    const auto modules = module_work_of(of.model, of.shape, of.sequences, layout);
    const auto seconds = compute_seconds(profile, work_of(of.model, of.shape, of.sequences, layout));
    ASSERT_EQ(modules.size(), seconds.size());
    for (std::size_t i = 0; i < modules.size(); ++i) {
      double forward = 0.0, backward = 0.0;
      for (const LayerWork& module : modules[i]) {
        forward += bound_seconds(profile, module.forward).total();
        backward += bound_seconds(profile, module.backward).total();
      }
      EXPECT_NEAR(forward, seconds[i].forward, 1e-12 * seconds[i].forward);
      EXPECT_NEAR(backward, seconds[i].backward, 1e-12 * seconds[i].backward);
    }
  }
}

TEST(ModuleWork, EachMatrixHasTheKindOfItsModule) {
  for (const std::string& name : builtin_models()) {
    const ModelConfig c = builtin_model(name);
    const RunShape shape{.batch = 2, .sequence = 16};
    const LayerModules block = module_work_of(c, shape).at(1);
    std::map<ModuleKind, double> flops;
    for (const LinearLayer& linear : linear_layers(c)) {
      if (linear.experts == 0) {
        flops[kind_of_linear(linear.module)] += 2.0 * 32.0 * static_cast<double>(linear.inputs * linear.outputs);
      }
    }
    for (const auto& [kind, expected] : flops) {
      EXPECT_EQ(block[static_cast<std::size_t>(kind)].forward.matmul_flops, expected) << name << " " << name_of(kind);
    }
  }
}

/// Eight-bit products are those of the linear layers of blocks, and cost no FLOP more or less.
TEST(ModuleWork, EightBitProductsTakeThePlaceOfOthers) {
  for (const char* name : {"tiny-gpt2", "tiny-llama", "tiny-moe", "llama3.1-8b"}) {
    const ModelConfig c = builtin_model(name);
    for (const std::int64_t recomputed : {std::int64_t{0}, c.layers}) {
      const RunShape plain{.batch = 2, .sequence = 64, .compute = DType::bf16, .recomputed_blocks = recomputed};
      RunShape shape = plain;
      shape.fp8 = Fp8Products{};
      const auto before = module_work_of(c, plain), after = module_work_of(c, shape);
      for (std::size_t layer = 0; layer < before.size(); ++layer) {
        for (std::size_t kind = 0; kind < module_kinds; ++kind) {
          const auto k = static_cast<ModuleKind>(kind);
          const bool linear = k == ModuleKind::qkv || k == ModuleKind::output || k == ModuleKind::mlp;
          const bool block = layer > 0 && layer + 1 < before.size();
          for (PassWork LayerWork::*const pass : {&LayerWork::forward, &LayerWork::backward}) {
            const PassWork &was = before[layer][kind].*pass, &is = after[layer][kind].*pass;
            EXPECT_EQ(is.matmul_flops + is.fp8_flops, was.matmul_flops) << name << " " << name_of(k);
            EXPECT_EQ(is.fp8_flops, linear && block ? was.matmul_flops : 0.0) << name << " " << name_of(k);
            EXPECT_EQ(is.memory_bytes > was.memory_bytes, is.fp8_flops > 0.0) << name << " " << name_of(k);
          }
        }
      }
      EXPECT_TRUE(fp8_exceptions(c, shape).empty());
    }
  }
}

TEST(ModuleWork, LayersOfOtherSizesKeepTheirProducts) {
  ModelConfig c = builtin_model("tiny-llama");
  c.ffn = 100;
  RunShape shape{.batch = 2, .sequence = 64, .compute = DType::bf16};
  shape.fp8 = Fp8Products{};
  EXPECT_EQ(fp8_exceptions(c, shape).size(), 3U);
  const LayerModules block = module_work_of(c, shape).at(1);
  EXPECT_EQ(block[static_cast<std::size_t>(ModuleKind::mlp)].forward.fp8_flops, 0.0);
  EXPECT_GT(block[static_cast<std::size_t>(ModuleKind::qkv)].forward.fp8_flops, 0.0);
  shape.sequence = 63;
  EXPECT_EQ(fp8_exceptions(c, shape).size(), linear_layers(c).size());
}

/// Bytes and kernels of quantizing in a block of Llama's, by hand: 3 bytes an element of what comes with its magnitude,
/// and a kernel, 2 and a kernel more otherwise; gradients are written twice.
TEST(ModuleWork, QuantizingIsCountedByWhoKnowsTheMagnitude) {
  const ModelConfig c = builtin_model("tiny-llama");
  RunShape shape{.batch = 2, .sequence = 64, .compute = DType::bf16}, plain = shape;
  shape.fp8 = Fp8Products{};
  const auto n = static_cast<double>(shape.batch * shape.sequence), width = static_cast<double>(c.width),
             ffn = static_cast<double>(c.ffn);
  for (const bool again : {false, true}) {
    shape.recomputed_blocks = plain.recomputed_blocks = again ? c.layers : 0;
    const auto mlp = static_cast<std::size_t>(ModuleKind::mlp), output = static_cast<std::size_t>(ModuleKind::output);
    const LayerModules before = module_work_of(c, plain).at(1), after = module_work_of(c, shape).at(1);
    const auto bytes = [&](std::size_t kind, PassWork LayerWork::*pass) {
      return (after[kind].*pass).memory_bytes - (before[kind].*pass).memory_bytes;
    };
    const auto kernels = [&](std::size_t kind, PassWork LayerWork::*pass) {
      return (after[kind].*pass).kernels - (before[kind].*pass).kernels;
    };
    const double weights = 5.0 * 3.0 * width * ffn, inputs = 3.0 * n * (width + ffn);
    const double gradients = 4.0 * n * 2.0 * ffn + 6.0 * n * width;
    const double more = again ? 1.0 : 0.0;
    EXPECT_EQ(bytes(mlp, &LayerWork::forward), weights + inputs);
    EXPECT_EQ(bytes(mlp, &LayerWork::backward), (1.0 + more) * (weights + inputs) + gradients);
    EXPECT_EQ(kernels(mlp, &LayerWork::forward), 2.0 * 3.0 + 2.0);
    EXPECT_EQ(kernels(mlp, &LayerWork::backward), (1.0 + more) * 8.0 + 2.0 * 1.0 + 2.0);
    const auto heads = static_cast<double>(c.heads * c.head_dim), square = 5.0 * width * heads;
    EXPECT_EQ(bytes(output, &LayerWork::forward), square + 5.0 * n * heads);
    EXPECT_EQ(bytes(output, &LayerWork::backward),
              square + 3.0 * n * heads + more * (square + 5.0 * n * heads) + 6.0 * n * width);
  }
}

/// Not norms, embedding, head, router and experts.
TEST(ModuleWork, WeightsOfEightBitProductsAreThoseOfLinearLayers) {
  for (const auto& [name, each] : {std::pair{"tiny-llama", 7}, {"tiny-gpt2", 4}, {"tiny-moe", 4}}) {
    const ModelConfig c = builtin_model(name);
    const ParameterLayout layout = layout_of(c);
    RunShape shape{.batch = 2, .sequence = 64, .compute = DType::bf16};
    const auto weights = [&] {
      return std::ranges::count_if(layout.owned_parameters(),
                                   [&](const Parameter* p) { return has_fp8_product(c, shape, *p); });
    };
    EXPECT_EQ(weights(), 0) << name;
    shape.fp8 = Fp8Products{};
    EXPECT_EQ(weights(), each * c.layers) << name;
    shape.sequence = 63;
    EXPECT_EQ(weights(), 0) << name;
  }
}

}  // namespace
}  // namespace tandem
