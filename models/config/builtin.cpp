// The built-in shapes. Published numbers are those of the models' config.json files.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "core/base/error.hpp"
#include "models/config/config.hpp"

namespace tandem {
namespace {

ModelConfig gpt2(std::string name, std::int64_t layers, std::int64_t heads, std::int64_t width) {
  ModelConfig c;
  c.name = std::move(name);
  c.architecture = "GPT2LMHeadModel";
  c.family = Family::gpt2;
  c.vocabulary = 50257;
  c.positions = 1024;
  c.width = width;
  c.layers = layers;
  c.heads = c.kv_heads = heads;
  c.head_dim = width / heads;
  c.ffn = 4 * width;
  return c;
}

/// Sizes in which the models of the Llama family differ most.
struct LlamaSizes {
  std::int64_t layers, heads, kv_heads, width, head_dim, ffn;
};

ModelConfig llama_family(std::string name, std::string architecture, const LlamaSizes& s) {
  ModelConfig c;
  c.name = std::move(name);
  c.architecture = std::move(architecture);
  c.family = Family::llama;
  c.width = s.width;
  c.layers = s.layers;
  c.heads = s.heads;
  c.kv_heads = s.kv_heads;
  c.head_dim = s.head_dim;
  c.ffn = s.ffn;
  return c;
}

ModelConfig llama3(std::string name, const LlamaSizes& s, bool tied, double factor) {
  ModelConfig c = llama_family(std::move(name), "LlamaForCausalLM", s);
  c.vocabulary = 128256;
  c.positions = 131072;
  c.tied_head = tied;
  c.rope_theta = 500000.0;
  c.rope_scaling = Llama3RopeScaling{.factor = factor};
  return c;
}

ModelConfig qwen2(std::string name, const LlamaSizes& s, std::int64_t vocabulary, std::int64_t positions, bool tied) {
  ModelConfig c = llama_family(std::move(name), "Qwen2ForCausalLM", s);
  c.vocabulary = vocabulary;
  c.positions = positions;
  c.tied_head = tied;
  c.qkv_bias = true;
  c.norm_eps = 1e-6;
  c.rope_theta = 1e6;
  return c;
}

ModelConfig qwen3(std::string name, const LlamaSizes& s, bool tied) {
  ModelConfig c = llama_family(std::move(name), "Qwen3ForCausalLM", s);
  c.vocabulary = 151936;
  c.positions = 40960;
  c.tied_head = tied;
  c.qk_norm = QkNorm::per_head;
  c.norm_eps = 1e-6;
  c.rope_theta = 1e6;
  return c;
}

ModelConfig qwen3_moe(std::string name, const LlamaSizes& s) {
  ModelConfig c = qwen3(std::move(name), s, false);
  c.architecture = "Qwen3MoeForCausalLM";
  c.experts = 128;
  c.chosen_experts = 8;
  c.normalized_weights = true;
  return c;
}

ModelConfig olmoe_1b_7b() {
  ModelConfig c = llama_family("olmoe-1b-7b", "OlmoeForCausalLM", {16, 16, 16, 2048, 128, 1024});
  c.vocabulary = 50304;
  c.positions = 4096;
  c.tied_head = false;
  c.qk_norm = QkNorm::whole;
  c.experts = 64;
  c.chosen_experts = 8;
  return c;
}

ModelConfig mixtral_8x7b() {
  ModelConfig c = llama_family("mixtral-8x7b", "MixtralForCausalLM", {32, 32, 8, 4096, 128, 14336});
  c.vocabulary = 32000;
  c.positions = 32768;
  c.tied_head = false;
  c.rope_theta = 1e6;
  c.experts = 8;
  c.chosen_experts = 2;
  c.normalized_weights = true;
  c.expert_names = ExpertNames::block_sparse_moe;
  return c;
}

ModelConfig mistral_7b() {  // version 0.3: no sliding window
  ModelConfig c = llama_family("mistral-7b", "MistralForCausalLM", {32, 32, 8, 4096, 128, 14336});
  c.vocabulary = 32768;
  c.positions = 32768;
  c.tied_head = false;
  c.rope_theta = 1e6;
  return c;
}

/// Shape of the phi-3 models and of phi-4.
ModelConfig phi3(std::string name, const LlamaSizes& s, std::int64_t vocabulary, std::int64_t positions, double theta) {
  ModelConfig c = llama_family(std::move(name), "Phi3ForCausalLM", s);
  c.vocabulary = vocabulary;
  c.positions = positions;
  c.tied_head = false;
  c.fused_tensors = true;
  c.rope_theta = theta;
  return c;
}

ModelConfig phi3_mini() {  // the model for 4,096 positions
  ModelConfig c = phi3("phi-3-mini", {32, 32, 32, 3072, 96, 8192}, 32064, 4096, 10000.0);
  c.window = 2047;
  c.attention.assign(32, {.windowed = true});
  return c;
}

ModelConfig smollm3_3b() {
  ModelConfig c = llama_family("smollm3-3b", "SmolLM3ForCausalLM", {36, 16, 4, 2048, 128, 11008});
  c.vocabulary = 128256;
  c.positions = 65536;
  c.norm_eps = 1e-6;
  c.rope_theta = 5e6;
  for (int i = 1; i <= 36; ++i) c.attention.push_back({.rotated = i % 4 != 0});
  return c;
}

ModelConfig olmo2(std::string name, const LlamaSizes& s) {
  ModelConfig c = llama_family(std::move(name), "Olmo2ForCausalLM", s);
  c.vocabulary = 100352;
  c.positions = 4096;
  c.tied_head = false;
  c.qk_norm = QkNorm::whole;
  c.norm_before = false;
  c.norm_after = true;
  c.norm_eps = 1e-6;
  c.rope_theta = 500000.0;
  return c;
}

/// The language model of a Gemma 3, without its vision part.
ModelConfig gemma3(std::string name, const LlamaSizes& s, std::int64_t vocabulary, std::int64_t positions,
                   std::int64_t window) {
  ModelConfig c = llama_family(std::move(name), "Gemma3ForCausalLM", s);
  c.vocabulary = vocabulary;
  c.positions = positions;
  c.qk_norm = QkNorm::per_head;
  c.gate = Gate::gelu;
  c.norm_after = true;
  c.norm_offset = 1.0;
  c.norm_eps = 1e-6;
  c.embedding_factor = std::sqrt(static_cast<double>(c.width));
  c.attention_scale = 1.0 / 16.0;
  c.rope_theta = 1e6;
  c.scales_all = false;
  c.window_theta = 10000.0;
  c.window = window;
  for (std::int64_t i = 1; i <= c.layers; ++i) c.attention.push_back({.windowed = i % 6 != 0});
  if (positions > 32768) c.rope_scaling = LinearRopeScaling{8.0};
  return c;
}

ModelConfig tiny_gpt2() {
  ModelConfig c = gpt2("tiny-gpt2", 4, 6, 192);
  c.vocabulary = 256;
  c.positions = 256;
  return c;
}

ModelConfig tiny_moe() {
  ModelConfig c = llama_family("tiny-moe", "Qwen3MoeForCausalLM", {4, 6, 2, 192, 32, 96});
  c.vocabulary = 256;
  c.positions = 512;
  c.qk_norm = QkNorm::per_head;
  c.experts = 16;
  c.chosen_experts = 4;
  c.normalized_weights = true;
  return c;
}

ModelConfig tiny_llama() {
  ModelConfig c = llama_family("tiny-llama", "LlamaForCausalLM", {4, 6, 2, 192, 32, 512});
  c.vocabulary = 256;
  c.positions = 512;
  return c;
}

const std::vector<ModelConfig>& shapes() {
  static const std::vector<ModelConfig> all = {
      tiny_gpt2(),
      tiny_llama(),
      tiny_moe(),
      gpt2("gpt2", 12, 12, 768),
      gpt2("gpt2-medium", 24, 16, 1024),
      gpt2("gpt2-large", 36, 20, 1280),
      gpt2("gpt2-xl", 48, 25, 1600),
      llama3("llama3.2-1b", {16, 32, 8, 2048, 64, 8192}, true, 32.0),
      llama3("llama3.2-3b", {28, 24, 8, 3072, 128, 8192}, true, 32.0),
      llama3("llama3.1-8b", {32, 32, 8, 4096, 128, 14336}, false, 8.0),
      llama3("llama3.1-70b", {80, 64, 8, 8192, 128, 28672}, false, 8.0),
      qwen2("qwen2.5-0.5b", {24, 14, 2, 896, 64, 4864}, 151936, 32768, true),
      qwen2("qwen2.5-1.5b", {28, 12, 2, 1536, 128, 8960}, 151936, 131072, true),
      qwen2("qwen2.5-7b", {28, 28, 4, 3584, 128, 18944}, 152064, 131072, false),
      qwen3("qwen3-0.6b", {28, 16, 8, 1024, 128, 3072}, true),
      qwen3("qwen3-1.7b", {28, 16, 8, 2048, 128, 6144}, true),
      qwen3("qwen3-4b", {36, 32, 8, 2560, 128, 9728}, true),
      qwen3("qwen3-8b", {36, 32, 8, 4096, 128, 12288}, false),
      qwen3("qwen3-14b", {40, 40, 8, 5120, 128, 17408}, false),
      qwen3("qwen3-32b", {64, 64, 8, 5120, 128, 25600}, false),
      qwen3_moe("qwen3-30b-a3b", {48, 32, 4, 2048, 128, 768}),
      olmoe_1b_7b(),
      mixtral_8x7b(),
      mistral_7b(),
      phi3_mini(),
      phi3("phi-4", {40, 40, 10, 5120, 128, 17920}, 100352, 16384, 250000.0),
      smollm3_3b(),
      olmo2("olmo2-7b", {32, 32, 32, 4096, 128, 11008}),
      olmo2("olmo2-13b", {40, 40, 40, 5120, 128, 13824}),
      gemma3("gemma3-270m", {18, 4, 1, 640, 256, 2048}, 262144, 32768, 512),
      gemma3("gemma3-1b", {26, 4, 1, 1152, 256, 6912}, 262144, 32768, 512),
      gemma3("gemma3-4b", {34, 8, 4, 2560, 256, 10240}, 262208, 131072, 1024),
      gemma3("gemma3-12b", {48, 16, 8, 3840, 256, 15360}, 262208, 131072, 1024),
  };
  return all;
}

}  // namespace

std::vector<std::string> builtin_models() {
  std::vector<std::string> names;
  for (const ModelConfig& c : shapes()) names.push_back(c.name);
  return names;
}

ModelConfig builtin_model(std::string_view name) {
  const auto& all = shapes();
  const auto found = std::find_if(all.begin(), all.end(), [&](const ModelConfig& c) { return c.name == name; });
  if (found != all.end()) return *found;
  throw UsageError(fmt::format("model '{}'", name), "there is no built-in shape of that name",
                   fmt::format("one of {}", fmt::join(builtin_models(), ", ")));
}

}  // namespace tandem
