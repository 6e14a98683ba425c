#pragma once
// The classes of transformers that are supported: what each computes, and what it takes where config.json does not say.
#include <cstdint>
#include <string_view>

#include "models/config/config.hpp"

namespace tandem {

/// How a class says which layers have a sliding window.
enum class WindowFields : std::uint8_t {
  none,          ///< no windows
  all,           ///< "sliding_window" is the window of all layers
  listed,        ///< "layer_types" lists the layers with a window
  switched,      ///< "layer_types" lists them, where "use_sliding_window" is true
  switched_all,  ///< all layers have the window where "use_sliding_window" is true
};

/// Experts in the MLP's place, where a class has them.
struct HfExperts {
  std::int64_t count = 0;   ///< default number of experts; 0: the class has none
  std::int64_t chosen = 0;  ///< default number of experts for each token
  const char* count_key = "num_experts";
  const char* width_key = "intermediate_size";
  bool normalized = false;  ///< always; else "norm_topk_prob" says so
  ExpertNames names = ExpertNames::mlp;
};

/// Sizes that a config.json may leave out; 0: it may not, or they follow from others.
struct HfSizes {
  std::int64_t vocabulary = 0, positions = 0, heads = 0, kv_heads = 0, head_dim = 0;
};

struct HfArchitecture {
  std::string_view name;        ///< name in "architectures"
  std::string_view model_type;  ///< name in "model_type"
  /// The multimodal class whose language model this is: its config.json has the fields in "text_config".
  std::string_view seeing{}, seeing_type{};
  Family family = Family::llama;
  // Fields of ModelConfig with the same names.
  bool qkv_bias = false;
  QkNorm qk_norm = QkNorm::none;
  Gate gate = Gate::silu;
  bool norm_before = true;
  bool norm_after = false;
  double norm_offset = 0.0;
  bool fused_tensors = false;
  bool scales_all = true;
  // Fields that its code knows.
  bool attention_bias = false;
  bool mlp_bias = false;
  bool no_rope_layers = false;
  bool factors = false;           ///< Granite's multipliers
  bool scaled_embedding = false;  ///< embeddings are scaled by the root of the width (Gemma)
  bool query_pre_attn_scalar = false;
  WindowFields windows = WindowFields::none;
  HfExperts experts{};
  // Defaults.
  HfSizes sizes{};
  std::int64_t sliding_window = 0;   ///< 0: none
  std::int64_t window_interval = 4;  ///< distance of listed layers without a window
  double window_theta = 0.0;         ///< 0: that of the other layers
  bool tied_head = false;
  double norm_eps = 1e-6;
  double rope_theta = 10000.0;
};

inline constexpr HfArchitecture hf_architectures[] = {
    {.name = "GPT2LMHeadModel", .model_type = "gpt2", .family = Family::gpt2, .tied_head = true, .norm_eps = 1e-5},
    {.name = "LlamaForCausalLM", .model_type = "llama", .attention_bias = true, .mlp_bias = true},
    {.name = "Qwen2ForCausalLM",
     .model_type = "qwen2",
     .qkv_bias = true,
     .windows = WindowFields::switched,
     .sliding_window = 4096},
    {.name = "Qwen3ForCausalLM",
     .model_type = "qwen3",
     .qk_norm = QkNorm::per_head,
     .attention_bias = true,
     .windows = WindowFields::switched,
     .sliding_window = 4096},
    {.name = "MistralForCausalLM", .model_type = "mistral", .windows = WindowFields::all, .sliding_window = 4096},
    {.name = "GemmaForCausalLM",
     .model_type = "gemma",
     .gate = Gate::gelu,
     .norm_offset = 1.0,
     .attention_bias = true,
     .scaled_embedding = true,
     .sizes = {.vocabulary = 256000, .positions = 8192, .heads = 16, .kv_heads = 16, .head_dim = 256},
     .tied_head = true},
    {.name = "Gemma3ForCausalLM",
     .model_type = "gemma3_text",
     .seeing = "Gemma3ForConditionalGeneration",
     .seeing_type = "gemma3",
     .qk_norm = QkNorm::per_head,
     .gate = Gate::gelu,
     .norm_after = true,
     .norm_offset = 1.0,
     .scales_all = false,
     .attention_bias = true,
     .scaled_embedding = true,
     .query_pre_attn_scalar = true,
     .windows = WindowFields::listed,
     .sizes = {.vocabulary = 262208, .positions = 131072, .heads = 8, .kv_heads = 4, .head_dim = 256},
     .sliding_window = 4096,
     .window_interval = 6,
     .window_theta = 10000.0,
     .tied_head = true,
     .rope_theta = 1e6},
    {.name = "GraniteForCausalLM", .model_type = "granite", .attention_bias = true, .mlp_bias = true, .factors = true},
    {.name = "MixtralForCausalLM",
     .model_type = "mixtral",
     .windows = WindowFields::all,
     .experts = {.count = 8,
                 .chosen = 2,
                 .count_key = "num_local_experts",
                 .normalized = true,
                 .names = ExpertNames::block_sparse_moe},
     .norm_eps = 1e-5,
     .rope_theta = 1e6},
    {.name = "Qwen3MoeForCausalLM",
     .model_type = "qwen3_moe",
     .qk_norm = QkNorm::per_head,
     .attention_bias = true,
     .windows = WindowFields::switched_all,
     .experts = {.count = 128, .chosen = 8, .width_key = "moe_intermediate_size"},
     .sliding_window = 4096},
    {.name = "OlmoeForCausalLM",
     .model_type = "olmoe",
     .qk_norm = QkNorm::whole,
     .attention_bias = true,
     .experts = {.count = 64, .chosen = 8},
     .norm_eps = 1e-5},
    {.name = "Phi3ForCausalLM",
     .model_type = "phi3",
     .fused_tensors = true,
     .windows = WindowFields::all,
     .norm_eps = 1e-5},
    {.name = "SmolLM3ForCausalLM",
     .model_type = "smollm3",
     .attention_bias = true,
     .mlp_bias = true,
     .no_rope_layers = true,
     .windows = WindowFields::switched,
     .tied_head = true,
     .rope_theta = 2e6},
    {.name = "Olmo2ForCausalLM",
     .model_type = "olmo2",
     .qk_norm = QkNorm::whole,
     .norm_before = false,
     .norm_after = true,
     .attention_bias = true,
     .norm_eps = 1e-5},
    {.name = "Olmo3ForCausalLM",
     .model_type = "olmo3",
     .qk_norm = QkNorm::whole,
     .norm_before = false,
     .norm_after = true,
     .scales_all = false,
     .attention_bias = true,
     .windows = WindowFields::listed,
     .sliding_window = 4096,
     .norm_eps = 1e-5,
     .rope_theta = 5e5},
};

}  // namespace tandem
