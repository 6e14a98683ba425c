// config.json as transformers 4 and 5 write it, and what is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "core/base/error.hpp"
#include "models/config/config.hpp"
#include "models/hf/hf_config.hpp"
#include "tests/models/fixture.hpp"

namespace tandem::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

const std::string gpt2_text = R"({
  "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "activation_function": "gelu_new",
  "vocab_size": 50257, "n_positions": 1024, "n_ctx": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12,
  "layer_norm_epsilon": 1e-05, "initializer_range": 0.02, "resid_pdrop": 0.1,
  "task_specific_params": {"text-generation": {"do_sample": true}}})";

// config.json in the spelling of transformers 4.
const std::string llama_text = R"({
  "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "torch_dtype": "bfloat16",
  "attention_bias": false, "mlp_bias": false, "vocab_size": 128256, "max_position_embeddings": 131072,
  "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
  "intermediate_size": 8192, "rms_norm_eps": 1e-05, "initializer_range": 0.02, "tie_word_embeddings": true,
  "rope_theta": 500000.0, "pretraining_tp": 1,
  "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                   "original_max_position_embeddings": 8192, "rope_type": "llama3"}})";

const std::string qwen2_text = R"({
  "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "hidden_size": 896,
  "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 24, "num_attention_heads": 14,
  "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
  "sliding_window": 32768, "tie_word_embeddings": true, "use_sliding_window": false, "vocab_size": 151936})";

const std::string mistral_text = R"({
  "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_act": "silu", "hidden_size": 4096,
  "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 32,
  "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": null,
  "tie_word_embeddings": false, "vocab_size": 32768})";

const std::string phi3_text = R"({
  "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "hidden_act": "silu", "hidden_size": 3072,
  "intermediate_size": 8192, "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
  "num_key_value_heads": 32, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-05, "rope_scaling": null,
  "rope_theta": 10000.0, "sliding_window": 2047, "tie_word_embeddings": false, "vocab_size": 32064})";

const std::string smollm3_text = R"({
  "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "hidden_act": "silu", "hidden_size": 2048,
  "attention_bias": false, "mlp_bias": false, "intermediate_size": 11008, "max_position_embeddings": 65536,
  "no_rope_layer_interval": 4, "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 4,
  "rms_norm_eps": 1e-06, "rope_theta": 5000000.0, "use_sliding_window": false, "sliding_window": null,
  "vocab_size": 128256})";

const std::string olmo2_text = R"({
  "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "hidden_act": "silu", "hidden_size": 4096,
  "attention_bias": false, "intermediate_size": 11008, "max_position_embeddings": 4096, "num_attention_heads": 32,
  "num_hidden_layers": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-06, "rope_theta": 500000,
  "tie_word_embeddings": false, "vocab_size": 100352})";

/// Qwen/Qwen3-30B-A3B, as transformers 4 wrote it.
constexpr const char* qwen3_moe_text = R"({"architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false,
  "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144,
  "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe",
  "moe_intermediate_size": 768, "norm_topk_prob": true, "num_attention_heads": 32, "num_experts": 128,
  "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": false,
  "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
  "sliding_window": null, "tie_word_embeddings": false, "use_sliding_window": false, "vocab_size": 151936})";

/// google/gemma-3-1b-pt, and what google/gemma-3-4b-it says of the model that reads and writes text.
constexpr const char* gemma3_text = R"({"architectures": ["Gemma3ForCausalLM"], "attention_bias": false,
  "attn_logit_softcapping": null, "bos_token_id": 2, "eos_token_id": 1, "final_logit_softcapping": null,
  "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "initializer_range": 0.02,
  "intermediate_size": 6912, "max_position_embeddings": 32768, "model_type": "gemma3_text", "num_attention_heads": 4,
  "num_hidden_layers": 26, "num_key_value_heads": 1, "pad_token_id": 0, "query_pre_attn_scalar": 256,
  "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": null, "rope_theta": 1000000,
  "sliding_window": 512, "sliding_window_pattern": 6, "vocab_size": 262144})";
constexpr const char* gemma3_seeing_text = R"({"architectures": ["Gemma3ForConditionalGeneration"],
  "boi_token_index": 255999, "eos_token_id": [1, 106], "initializer_range": 0.02, "model_type": "gemma3",
  "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
                  "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024},
  "torch_dtype": "bfloat16", "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"}})";

ModelConfig parsed(const std::string& text) {
  const TemporaryFolder folder;
  return read_hf_config(folder.write("config.json", text)).config;
}

/// The message of the UsageError, or "accepted".
std::string refusal(const std::string& text) {
  try {
    parsed(text);
  } catch (const UsageError& e) {
    EXPECT_THAT(e.what(), Not(HasSubstr("\n")));
    EXPECT_THAT(e.what(), HasSubstr("config.json"));
    return e.what();
  } catch (const std::exception& e) {
    return std::string("another exception: ") + e.what();
  }
  return "accepted";
}

/// `text` with one field before all others; later ones of that name go.
std::string with(std::string text, const std::string& key, const std::string& value) {
  const std::string quoted = "\"" + key + "\":";
  if (const auto at = text.find(quoted); at != std::string::npos) text.replace(at, quoted.size(), "\"unused\":");
  return text.replace(text.find('{'), 1, "{" + quoted + " " + value + ", ");
}

void expect_same(const ModelConfig& a, const ModelConfig& b) {
  EXPECT_EQ(a.architecture, b.architecture);
  EXPECT_EQ(a.family, b.family);
  EXPECT_EQ(a.vocabulary, b.vocabulary);
  EXPECT_EQ(a.positions, b.positions);
  EXPECT_EQ(a.width, b.width);
  EXPECT_EQ(a.layers, b.layers);
  EXPECT_EQ(a.heads, b.heads);
  EXPECT_EQ(a.kv_heads, b.kv_heads);
  EXPECT_EQ(a.head_dim, b.head_dim);
  EXPECT_EQ(a.ffn, b.ffn);
  EXPECT_EQ(a.norm_eps, b.norm_eps);
  EXPECT_EQ(a.initializer_range, b.initializer_range);
  EXPECT_EQ(a.tied_head, b.tied_head);
  EXPECT_EQ(a.qkv_bias, b.qkv_bias);
  EXPECT_EQ(a.output_bias, b.output_bias);
  EXPECT_EQ(a.mlp_bias, b.mlp_bias);
  EXPECT_EQ(a.qk_norm, b.qk_norm);
  EXPECT_EQ(a.gate, b.gate);
  EXPECT_EQ(a.norm_before, b.norm_before);
  EXPECT_EQ(a.norm_after, b.norm_after);
  EXPECT_EQ(a.norm_offset, b.norm_offset);
  EXPECT_EQ(a.fused_tensors, b.fused_tensors);
  EXPECT_EQ(a.embedding_factor, b.embedding_factor);
  EXPECT_EQ(a.residual_factor, b.residual_factor);
  EXPECT_EQ(a.attention_scale, b.attention_scale);
  EXPECT_EQ(a.logits_divisor, b.logits_divisor);
  EXPECT_EQ(a.experts, b.experts);
  EXPECT_EQ(a.chosen_experts, b.chosen_experts);
  EXPECT_EQ(a.normalized_weights, b.normalized_weights);
  EXPECT_EQ(a.expert_names, b.expert_names);
  EXPECT_EQ(a.rope_theta, b.rope_theta);
  EXPECT_EQ(a.rotated_share, b.rotated_share);
  EXPECT_EQ(a.rope_scaling, b.rope_scaling);
  EXPECT_EQ(a.scales_all, b.scales_all);
  EXPECT_EQ(a.window_theta, b.window_theta);
  EXPECT_EQ(a.attention, b.attention);
  EXPECT_EQ(a.window, b.window);
}

TEST(HfConfig, PublishedFilesGiveTheBuiltinShapes) {
  expect_same(parsed(gpt2_text), builtin_model("gpt2"));
  expect_same(parsed(llama_text), builtin_model("llama3.2-1b"));
  expect_same(parsed(qwen2_text), builtin_model("qwen2.5-0.5b"));
  expect_same(parsed(mistral_text), builtin_model("mistral-7b"));
  expect_same(parsed(phi3_text), builtin_model("phi-3-mini"));
  expect_same(parsed(smollm3_text), builtin_model("smollm3-3b"));
  expect_same(parsed(olmo2_text), builtin_model("olmo2-7b"));
  expect_same(parsed(gemma3_text), builtin_model("gemma3-1b"));
  expect_same(parsed(gemma3_seeing_text), builtin_model("gemma3-4b"));
}

// config.json of a model that sees: the part for text is read, with the facts beside it; its files have other tensors,
// too. The written description is that of a model of text.
TEST(HfConfig, OfAModelThatSeesThePartOfTextIsRead) {
  const ModelConfig c = parsed(gemma3_seeing_text);
  EXPECT_TRUE(c.is_multimodal);
  const std::vector<std::pair<std::string, std::string>> tokens = {{"eos_token_id", "[1,106]"}};
  EXPECT_EQ(c.passed_on, tokens);
  const ModelConfig written = parsed(hf_config_text(c, "bfloat16"));
  EXPECT_EQ(written.architecture, "Gemma3ForCausalLM");
  EXPECT_FALSE(written.is_multimodal);
  expect_same(written, c);
  EXPECT_FALSE(parsed(gemma3_text).is_multimodal);
  EXPECT_FALSE(parsed(with(gemma3_seeing_text, "tie_word_embeddings", "false")).tied_head);
  EXPECT_THAT(refusal(with(gemma3_seeing_text, "text_config", "3")), HasSubstr("'text_config'"));
  EXPECT_THAT(refusal(with(gemma3_seeing_text, "text_config", "{}")), HasSubstr("'text_config': 'hidden_size'"));
  EXPECT_THAT(refusal(with(gemma3_seeing_text, "architectures", "[\"Gemma3ForCausalLM\"]")), HasSubstr("accepted"));
}

TEST(HfConfig, GemmasFieldsAreRead) {
  const auto gemma3 = [](const char* key, const char* value) { return with(gemma3_text, key, value); };
  EXPECT_EQ(parsed(gemma3("query_pre_attn_scalar", "168")).attention_scale, 1.0 / std::sqrt(168.0));
  EXPECT_EQ(parsed(gemma3("hidden_size", "640")).embedding_factor, std::sqrt(640.0));
  EXPECT_EQ(parsed(gemma3("rope_local_base_freq", "500")).window_theta, 500.0);
  EXPECT_EQ(parsed(gemma3("rope_local_base_freq", "1000000")).window_theta, std::nullopt);  // one base for all
  const ModelConfig five = parsed(gemma3("rope_parameters", R"({
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 300.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 20.0}})"));                 // names of transformers 5
  EXPECT_EQ(five.rope_theta, 300.0);
  EXPECT_EQ(five.window_theta, 20.0);
  EXPECT_EQ(std::get<LinearRopeScaling>(*five.rope_scaling).factor, 8.0);
  EXPECT_EQ(five.rope(true).scaling, std::nullopt);
  const ModelConfig every = parsed(gemma3("sliding_window_pattern", "2"));
  EXPECT_EQ(every.window_of(0), 512);
  EXPECT_EQ(every.window_of(1), 0);
  // The first files of Gemma name the other GELU, and mean this one.
  const std::string gemma = R"({"architectures": ["GemmaForCausalLM"], "model_type": "gemma", "hidden_act": "gelu",
    "hidden_size": 2048, "intermediate_size": 16384, "num_attention_heads": 8, "num_hidden_layers": 18,
    "num_key_value_heads": 1, "hidden_activation": null})";
  const ModelConfig first = parsed(gemma);
  EXPECT_EQ(first.gate, Gate::gelu);
  EXPECT_EQ(first.norm_offset, 1.0);
  EXPECT_FALSE(first.norm_after);
  EXPECT_EQ(first.head_dim, 256);
  EXPECT_EQ(first.vocabulary, 256000);
  EXPECT_EQ(first.positions, 8192);
  EXPECT_EQ(first.embedding_factor, std::sqrt(2048.0));
  EXPECT_THAT(refusal(with(gemma, "hidden_activation", "\"gelu\"")), HasSubstr("'hidden_activation' is 'gelu'"));
  EXPECT_THAT(refusal(gemma3("hidden_activation", "\"silu\"")), HasSubstr("'hidden_activation' is 'silu'"));
  EXPECT_THAT(refusal(gemma3("final_logit_softcapping", "30.0")), HasSubstr("'final_logit_softcapping'"));
  EXPECT_THAT(refusal(gemma3("attn_logit_softcapping", "50.0")), HasSubstr("'attn_logit_softcapping'"));
  EXPECT_THAT(refusal(gemma3("use_bidirectional_attention", "true")), HasSubstr("'use_bidirectional_attention'"));
  EXPECT_THAT(refusal(gemma3("query_pre_attn_scalar", "0")), HasSubstr("attention's scale"));
  EXPECT_THAT(refusal(gemma3("query_pre_attn_scalar", "-4")), HasSubstr("attention's scale"));
  EXPECT_THAT(refusal(gemma3("rope_local_base_freq", "0")), HasSubstr("rope_theta of layers with a window is 0"));
  EXPECT_THAT(refusal(gemma3("sliding_window_pattern", "0")), HasSubstr("'sliding_window_pattern' is 0"));
}

TEST(HfConfig, Transformers5SpellingIsTheSame) {
  std::string text = with(with(llama_text, "rope_theta", "null"), "rope_scaling", "null");
  text = with(with(text, "torch_dtype", "null"), "dtype", "\"bfloat16\"");
  text = with(text, "rope_parameters",
              R"({"rope_theta": 500000.0, "rope_type": "llama3", "factor": 32.0, "high_freq_factor": 4.0,
                  "low_freq_factor": 1.0, "original_max_position_embeddings": 8192})");
  expect_same(parsed(text), builtin_model("llama3.2-1b"));
  const std::string plain = R"({"rope_theta": 1000000.0, "rope_type": "default"})";
  expect_same(parsed(with(with(qwen2_text, "rope_theta", "null"), "rope_parameters", plain)),
              builtin_model("qwen2.5-0.5b"));
}

TEST(HfConfig, NullsAndAbsentFieldsTakeTheDefaults) {
  EXPECT_EQ(parsed(with(llama_text, "head_dim", "null")).head_dim, 64);
  EXPECT_EQ(parsed(with(llama_text, "head_dim", "128")).head_dim, 128);
  EXPECT_EQ(parsed(with(llama_text, "num_key_value_heads", "null")).kv_heads, 32);
  EXPECT_EQ(parsed(with(llama_text, "tie_word_embeddings", "null")).tied_head, false);
  EXPECT_EQ(parsed(with(llama_text, "rope_scaling", "null")).rope_scaling, std::nullopt);
  EXPECT_EQ(parsed(with(llama_text, "rope_theta", "null")).rope_theta, 10000.0);
  EXPECT_EQ(parsed(with(llama_text, "architectures", "null")).architecture, "LlamaForCausalLM");
  EXPECT_EQ(parsed(with(gpt2_text, "n_inner", "null")).ffn, 3072);
  EXPECT_EQ(parsed(with(gpt2_text, "n_inner", "1000")).ffn, 1000);
  EXPECT_EQ(parsed(with(gpt2_text, "tie_word_embeddings", "false")).tied_head, false);
  EXPECT_EQ(parsed(with(gpt2_text, "activation_function", "\"gelu_pytorch_tanh\"")).ffn, 3072);
  EXPECT_EQ(parsed(with(llama_text, "rope_scaling", R"({"type": "default"})")).rope_scaling, std::nullopt);
}

TEST(HfConfig, FactorsOfGraniteAreRead) {
  const std::string text = with(with(llama_text, "architectures", "[\"GraniteForCausalLM\"]"), "rope_scaling", "null");
  const ModelConfig plain = parsed(text);
  EXPECT_EQ(plain.attention_scale, 1.0);  // its class's default, not what its heads would have
  const ModelConfig granite =
      parsed(with(with(with(with(text, "embedding_multiplier", "12"), "residual_multiplier", "0.22"),
                       "attention_multiplier", "0.015625"),
                  "logits_scaling", "8.0"));
  EXPECT_EQ(granite.embedding_factor, 12.0);
  EXPECT_EQ(granite.residual_factor, 0.22);
  EXPECT_EQ(granite.attention_scale, 0.015625);
  EXPECT_EQ(granite.logits_divisor, 8.0);
  EXPECT_THAT(refusal(with(text, "logits_scaling", "0")), HasSubstr("the logits' divisor is 0"));
  EXPECT_THAT(refusal(with(text, "residual_multiplier", "-1")), HasSubstr("the residual factor is -1"));
  EXPECT_EQ(parsed(with(llama_text, "embedding_multiplier", "12")).embedding_factor, 1.0);  // its class knows none
}

TEST(HfConfig, ExpertsAreRead) {
  const ModelConfig qwen3 = parsed(qwen3_moe_text);
  EXPECT_EQ(qwen3.experts, 128);
  EXPECT_EQ(qwen3.chosen_experts, 8);
  EXPECT_EQ(qwen3.ffn, 768);
  EXPECT_TRUE(qwen3.normalized_weights);
  EXPECT_EQ(qwen3.expert_names, ExpertNames::mlp);
  EXPECT_EQ(qwen3.qk_norm, QkNorm::per_head);
  EXPECT_EQ(qwen3.window, 0);
  const std::string written = hf_config_text(qwen3, "bfloat16");  // facts that others read of layers without experts
  EXPECT_THAT(written, HasSubstr("\"intermediate_size\": 6144"));
  EXPECT_THAT(written, HasSubstr("\"moe_intermediate_size\": 768"));
  EXPECT_THAT(written, HasSubstr("\"router_aux_loss_coef\": 0.001"));
  // Names that transformers 5 writes instead, and defaults that its class takes where config.json does not say.
  const ModelConfig other = parsed(with(with(qwen3_moe_text, "num_experts", "null"), "num_local_experts", "64"));
  EXPECT_EQ(other.experts, 64);
  EXPECT_FALSE(parsed(with(qwen3_moe_text, "norm_topk_prob", "null")).normalized_weights);
  const std::string mixtral = R"({"architectures": ["MixtralForCausalLM"], "hidden_size": 4096, "vocab_size": 32000,
    "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "sliding_window": null})";
  const ModelConfig builtin = builtin_model("mixtral-8x7b");
  expect_same(parsed(mixtral), builtin);
  EXPECT_EQ(parsed(with(mixtral, "num_experts_per_tok", "3")).chosen_experts, 3);
}

TEST(HfConfig, WhatIsNotComputedIsRefusedByName) {
  const auto gpt2 = [](const char* key, const char* value) { return refusal(with(gpt2_text, key, value)); };
  const auto llama = [](const char* key, const char* value) { return refusal(with(llama_text, key, value)); };
  EXPECT_THAT(gpt2("activation_function", "\"relu\""), HasSubstr("'activation_function' is 'relu'"));
  EXPECT_THAT(gpt2("activation_function", "\"gelu\""), HasSubstr("'gelu'"));
  EXPECT_THAT(gpt2("scale_attn_weights", "false"), HasSubstr("'scale_attn_weights'"));
  EXPECT_THAT(gpt2("scale_attn_by_inverse_layer_idx", "true"), HasSubstr("'scale_attn_by_inverse_layer_idx'"));
  EXPECT_THAT(gpt2("add_cross_attention", "true"), HasSubstr("'add_cross_attention'"));
  EXPECT_THAT(gpt2("architectures", "[\"GPT2Model\"]"), HasSubstr("'GPT2Model' is not supported"));
  EXPECT_THAT(llama("hidden_act", "\"gelu\""), HasSubstr("'hidden_act' is 'gelu'"));
  EXPECT_THAT(refusal(with(qwen2_text, "attention_bias", "true")), HasSubstr("'attention_bias'"));
  EXPECT_THAT(refusal(with(qwen2_text, "mlp_bias", "true")), HasSubstr("'mlp_bias'"));
  EXPECT_THAT(refusal(with(phi3_text, "attention_bias", "true")), HasSubstr("'attention_bias'"));
  EXPECT_THAT(llama("num_local_experts", "8"), HasSubstr("'num_local_experts'"));
  const auto moe = [](const char* key, const char* value) { return refusal(with(qwen3_moe_text, key, value)); };
  EXPECT_THAT(moe("output_router_logits", "true"), HasSubstr("'output_router_logits'"));
  EXPECT_THAT(moe("decoder_sparse_step", "2"), HasSubstr("'decoder_sparse_step'"));
  EXPECT_THAT(moe("mlp_only_layers", "[1]"), HasSubstr("'mlp_only_layers'"));
  EXPECT_THAT(moe("router_jitter_noise", "0.1"), HasSubstr("'router_jitter_noise'"));
  EXPECT_THAT(moe("clip_qkv", "8.0"), HasSubstr("'clip_qkv'"));
  EXPECT_THAT(moe("num_experts_per_tok", "129"), HasSubstr("experts that a token takes is 129, expected 1 to 128"));
  EXPECT_THAT(moe("num_experts_per_tok", "0"), HasSubstr("experts that a token takes is 0"));
  EXPECT_THAT(moe("num_experts", "0"), HasSubstr("the number of experts is 0"));
  EXPECT_THAT(moe("num_experts", "5000"), HasSubstr("the number of experts is 5000"));
  EXPECT_THAT(moe("num_experts", "-9223372036854775808"), HasSubstr("the number of experts"));
  EXPECT_THAT(moe("moe_intermediate_size", "4194304"), HasSubstr("inner width"));
  EXPECT_THAT(llama("architectures", "[\"DeepseekV3ForCausalLM\"]"), HasSubstr("'DeepseekV3ForCausalLM'"));
  EXPECT_THAT(llama("rope_scaling", R"({"rope_type": "proportional", "factor": 4.0})"), HasSubstr("'proportional'"));
  EXPECT_THAT(llama("rope_scaling", R"({"rope_type": "llama3", "factor": 4.0})"), HasSubstr("'low_freq_factor'"));
}

/// Layers of a model that have a window, as a string of w and -.
std::string windows(const ModelConfig& c) {
  std::string text;
  for (std::int64_t i = 0; i < c.layers; ++i) text += c.window_of(i) > 0 ? 'w' : '-';
  return text;
}

TEST(HfConfig, LayersHaveTheWindowsThatTheClassesGiveThem) {
  const std::string all(32, 'w'), none(32, '-');
  EXPECT_EQ(windows(parsed(with(mistral_text, "sliding_window", "1024"))), all);
  EXPECT_EQ(parsed(with(mistral_text, "sliding_window", "1024")).window, 1024);
  EXPECT_EQ(windows(parsed(mistral_text)), none);
  std::string absent = mistral_text;
  const std::string explicit_null = R"("sliding_window": null,)";
  absent.replace(absent.find(explicit_null), explicit_null.size(), "");
  EXPECT_EQ(parsed(absent).window, 4096) << "the class's default";
  EXPECT_EQ(windows(parsed(with(phi3_text, "sliding_window", "null"))), none);
  EXPECT_EQ(windows(parsed(with(phi3_text, "sliding_window", "4095"))), all);
  EXPECT_EQ(windows(parsed(with(phi3_text, "sliding_window", "4096"))), none) << "hides nothing";
  EXPECT_EQ(windows(parsed(with(qwen2_text, "sliding_window", "1024"))), std::string(24, '-')) << "not used";
  const std::string used = with(with(qwen2_text, "use_sliding_window", "true"), "sliding_window", "1024");
  EXPECT_EQ(windows(parsed(used)), std::string(24, '-')) << "from the 25th layer on";
  EXPECT_EQ(windows(parsed(with(used, "max_window_layers", "20"))), std::string(20, '-') + "wwww");
  const std::string four = with(used, "num_hidden_layers", "4");
  const std::string listed = R"(["full_attention", "sliding_attention", "full_attention", "sliding_attention"])";
  EXPECT_EQ(windows(parsed(with(four, "layer_types", listed))), "-w-w");
  const std::string of_olmo3 =
      with(with(olmo2_text, "architectures", R"(["Olmo3ForCausalLM"])"), "num_hidden_layers", "5");
  EXPECT_EQ(windows(parsed(of_olmo3)), "www-w");
  EXPECT_EQ(parsed(of_olmo3).window, 4096);
  const std::string moe = with(qwen3_moe_text, "use_sliding_window", "true");
  const std::string every(48, 'w');  // whatever "max_window_layers" says
  EXPECT_EQ(windows(parsed(with(moe, "sliding_window", "1024"))), every);
  EXPECT_EQ(windows(parsed(with(with(moe, "sliding_window", "1024"), "max_window_layers", "28"))), every);
  EXPECT_EQ(windows(parsed(moe)), std::string(48, '-')) << "its window is null";
  EXPECT_EQ(windows(parsed(with(qwen3_moe_text, "sliding_window", "1024"))), std::string(48, '-')) << "not used";
  const std::string smollm3 = with(with(smollm3_text, "use_sliding_window", "true"), "sliding_window", "64");
  EXPECT_EQ(windows(parsed(with(smollm3, "num_hidden_layers", "5"))), "---w-") << "those that know no positions";
}

TEST(HfConfig, WhatDoesNotFitTheLayersIsRefused) {
  EXPECT_THAT(refusal(with(mistral_text, "sliding_window", "0")), HasSubstr("'sliding_window' is 0"));
  EXPECT_THAT(refusal(with(qwen2_text, "layer_types", R"(["full_attention"])")), HasSubstr("1 entries for 24 layers"));
  const std::string two = with(qwen2_text, "num_hidden_layers", "2");
  EXPECT_THAT(refusal(with(two, "layer_types", R"(["full_attention", "linear_attention"])")),
              HasSubstr("'linear_attention'"));
  EXPECT_THAT(refusal(with(two, "layer_types", R"(["full_attention", "sliding_attention"])")),
              HasSubstr("no 'sliding_window' is in use"));
  EXPECT_THAT(refusal(with(two, "layer_types", "[1, 2]")), HasSubstr("expected a list of strings"));
  EXPECT_THAT(refusal(with(smollm3_text, "no_rope_layers", "[1, 0]")), HasSubstr("'no_rope_layers' has 2 of 36"));
  EXPECT_THAT(refusal(with(smollm3_text, "no_rope_layers", "[1.5]")), HasSubstr("expected a list of integers"));
  EXPECT_THAT(refusal(with(smollm3_text, "no_rope_layer_interval", "0")), HasSubstr("'no_rope_layer_interval'"));
}

TEST(HfConfig, LayersThatKnowNoPositionsAreTheListedOnes) {
  const ModelConfig c = parsed(with(with(smollm3_text, "num_hidden_layers", "3"), "no_rope_layers", "[0, 1, 0, 1]"));
  EXPECT_FALSE(c.attention_of(0).rotated);
  EXPECT_TRUE(c.attention_of(1).rotated);
  EXPECT_FALSE(c.attention_of(2).rotated);
}

/// Factors for a Llama with 64 elements a head, 32 of them rotated.
std::string long_factors(std::size_t count) {
  std::string list;
  for (std::size_t i = 0; i < count; ++i)
    list += (i == 0 ? "" : ", ") + std::to_string(1.0 + 0.25 * static_cast<double>(i));
  return R"({"type": "longrope", "short_factor": [)" + list + R"(], "long_factor": [)" + list + "]}";
}

TEST(HfConfig, EachRopeTypeIsReadWithItsDefaults) {
  const auto scaling = [](const char* json) { return parsed(with(llama_text, "rope_scaling", json)).rope_scaling; };
  EXPECT_EQ(scaling(R"({"type": "linear", "factor": 4.0})"), RopeScaling(LinearRopeScaling{4.0}));
  EXPECT_EQ(scaling(R"({"rope_type": "dynamic", "factor": 2})"), RopeScaling(DynamicRopeScaling{2.0}));
  EXPECT_EQ(scaling(R"({"rope_type": "yarn", "factor": 4.0})"),
            RopeScaling(YarnRopeScaling{.factor = 4.0, .original_positions = 131072.0}));
  EXPECT_EQ(scaling(R"({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "beta_fast": 16,
                        "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 1.0, "truncate": false})"),
            RopeScaling(YarnRopeScaling{.factor = 4.0,
                                        .original_positions = 32768.0,
                                        .beta_fast = 16.0,
                                        .beta_slow = 2.0,
                                        .attention_factor = {},
                                        .mscale = 0.7,
                                        .mscale_all_dim = 1.0,
                                        .truncate = false}));
  const std::string half = with(llama_text, "partial_rotary_factor", "0.5");
  EXPECT_EQ(parsed(with(half, "rope_scaling", long_factors(16))).rotary_dim(), 32);
  EXPECT_THAT(refusal(with(half, "rope_scaling", long_factors(32))),
              HasSubstr("short_factor has 32 values, expected 16"));
  EXPECT_THAT(refusal(with(llama_text, "rope_scaling", R"({"type": "linear"})")), HasSubstr("'factor' is missing"));
  EXPECT_THAT(refusal(with(llama_text, "rope_scaling", R"({"type": "linear", "factor": 0.0})")),
              HasSubstr("factor is 0"));
  EXPECT_THAT(refusal(with(llama_text, "rope_scaling", R"({"type": "longrope"})")), HasSubstr("'short_factor'"));
  EXPECT_THAT(refusal(with(llama_text, "partial_rotary_factor", "0.55")), HasSubstr("35 of the 64 elements"));
  EXPECT_THAT(refusal(with(llama_text, "partial_rotary_factor", "0.01")), HasSubstr("0 of the 64 elements"));
}

// transformers' class of Phi-3 takes what stands beside the scaling, and has a default.
TEST(HfConfig, PhiTakesThePositionsItWasFirstTrainedOnFromBesideTheScaling) {
  const auto original = [](const char* beside) {
    const std::string text = with(with(phi3_text, "hidden_size", "128"), "original_max_position_embeddings", beside);
    const ModelConfig c = parsed(with(text, "rope_scaling", R"({"type": "su", "short_factor": [1, 1], "long_factor":
                                      [2, 3], "original_max_position_embeddings": 77})"));
    return std::get<LongRopeScaling>(*c.rope_scaling).original_positions;
  };
  EXPECT_EQ(original("1024"), 1024.0);
  EXPECT_EQ(original("null"), 4096.0);
}

TEST(HfConfig, LayersWithAWindowMayHaveAnotherThetaAndNoScaling) {
  const std::string text = with(olmo2_text, "architectures", R"(["Olmo3ForCausalLM"])");
  const auto of_windows = [&](const char* json) {
    return with(text, "rope_parameters",
                std::string(R"({"full_attention": {"rope_type": "yarn", "factor": 8.0},
                                                         "sliding_attention": )") +
                    json + "}");
  };
  EXPECT_EQ(parsed(of_windows(R"({"rope_type": "default", "rope_theta": 500000})")).window_theta, std::nullopt);
  EXPECT_EQ(parsed(of_windows(R"({"rope_type": "default", "rope_theta": 10000})")).window_theta, 10000.0);
  EXPECT_THAT(refusal(of_windows(R"({"rope_type": "linear", "factor": 2})")), HasSubstr("the RoPE type 'linear'"));
  EXPECT_THAT(refusal(with(llama_text, "rope_parameters", R"({"sliding_attention": {"rope_type": "default"}})")),
              HasSubstr("'sliding_attention'"));
}

TEST(HfConfig, NumbersOutOfBoundsAreRefusedByName) {
  const auto gpt2 = [](const char* key, const char* value) { return refusal(with(gpt2_text, key, value)); };
  const auto llama = [](const char* key, const char* value) { return refusal(with(llama_text, key, value)); };
  EXPECT_THAT(llama("num_hidden_layers", "1152921504606846976"), HasSubstr("layers"));
  EXPECT_THAT(llama("num_hidden_layers", "18446744073709551615"), HasSubstr("'num_hidden_layers'"));
  EXPECT_THAT(llama("num_hidden_layers", "0"), HasSubstr("layers is 0"));
  EXPECT_THAT(llama("num_hidden_layers", "-3"), HasSubstr("layers is -3"));
  EXPECT_THAT(llama("num_hidden_layers", "1.5"), HasSubstr("'num_hidden_layers' is 1.5"));
  EXPECT_THAT(llama("num_hidden_layers", "\"16\""), HasSubstr("expected an integer"));
  EXPECT_THAT(llama("num_hidden_layers", "null"), HasSubstr("'num_hidden_layers' is missing"));
  EXPECT_THAT(llama("num_hidden_layers", "[[[]]]"), HasSubstr("expected an integer"));
  EXPECT_THAT(llama("hidden_size", "9223372036854775807"), HasSubstr("width"));
  EXPECT_THAT(llama("num_attention_heads", "0"), HasSubstr("heads is 0"));
  EXPECT_THAT(llama("num_attention_heads", "9223372036854775807"), HasSubstr("heads"));
  EXPECT_THAT(llama("num_key_value_heads", "5"), HasSubstr("do not divide"));
  EXPECT_THAT(llama("num_key_value_heads", "0"), HasSubstr("key/value heads is 0"));
  EXPECT_THAT(llama("head_dim", "63"), HasSubstr("63"));
  EXPECT_THAT(llama("intermediate_size", "1099511627776"), HasSubstr("inner width"));
  EXPECT_THAT(llama("rms_norm_eps", "0"), HasSubstr("epsilon"));
  EXPECT_THAT(llama("rms_norm_eps", "true"), HasSubstr("'rms_norm_eps' is true"));
  EXPECT_THAT(llama("rope_theta", "1e999"), Not(HasSubstr("accepted")));
  EXPECT_THAT(llama("rope_theta", "-1"), HasSubstr("rope_theta is -1"));
  EXPECT_THAT(llama("tie_word_embeddings", "1"), HasSubstr("expected true or false"));
  EXPECT_THAT(gpt2("n_embd", "4611686018427387904"), Not(HasSubstr("accepted")));
  EXPECT_THAT(gpt2("n_embd", "770"), HasSubstr("do not make up the width"));
  EXPECT_THAT(gpt2("n_head", "-12"), HasSubstr("heads is -12"));
  EXPECT_THAT(gpt2("vocab_size", "0"), HasSubstr("vocabulary is 0"));
}

TEST(HfConfig, WhatIsNotAConfigIsRefused) {
  EXPECT_THAT(refusal(""), HasSubstr("not JSON"));
  EXPECT_THAT(refusal("{\"model_type\": \"gpt2\""), HasSubstr("not JSON"));
  EXPECT_THAT(refusal("{\"model_type\": \"\xff\xfe\"}"), HasSubstr("not JSON"));
  EXPECT_THAT(refusal("[]"), HasSubstr("not a JSON object"));
  EXPECT_THAT(refusal("null"), HasSubstr("not a JSON object"));
  EXPECT_THAT(refusal("{}"), HasSubstr("model_type ''"));
  EXPECT_THAT(refusal("{\"architectures\": 3}"), HasSubstr("'architectures'"));
  EXPECT_THAT(refusal("{\"architectures\": [null]}"), HasSubstr("'architectures'"));
  EXPECT_THAT(refusal("{\"model_type\": \"line\\nbreak\"}"), HasSubstr("not supported"));
  EXPECT_THAT(refusal(std::string(100000, '[')), HasSubstr("nested too deep"));
  const TemporaryFolder folder;
  EXPECT_THROW(read_hf_config(folder.path() / "none.json"), UsageError);
  EXPECT_THROW(read_hf_config(folder.path()), UsageError);
}

TEST(HfConfig, QuantizedWeightsAreForTheirReaderToTake) {
  const std::string text = with(llama_text, "quantization_config", R"({"quant_method": "gptq"})");
  EXPECT_THROW(parse_hf_config(text, "config.json"), UsageError);
  const TemporaryFolder folder;
  const HfDescription read = read_hf_config(folder.write("config.json", text));
  EXPECT_THAT(read.quantization, HasSubstr("gptq"));
  EXPECT_EQ(read.config.width, parsed(llama_text).width);
  EXPECT_EQ(read_hf_config(folder.write("plain.json", llama_text)).quantization, "");
}

TEST(HfConfig, WhatIsWrittenReadsBackTheSame) {
  for (const std::string& name : builtin_models()) {
    SCOPED_TRACE(name);
    const ModelConfig config = builtin_model(name);
    expect_same(parsed(hf_config_text(config, "bfloat16")), config);
  }
  for (const std::string& name : fixture_names()) {
    SCOPED_TRACE(name);
    const ModelConfig config = Fixture(name).config();
    expect_same(parsed(hf_config_text(config, "bfloat16")), config);
  }
  for (const std::string& text :
       {with(with(qwen2_text, "use_sliding_window", "true"), "max_window_layers", "20"),
        with(with(smollm3_text, "use_sliding_window", "true"), "sliding_window", "64"),
        with(with(qwen3_moe_text, "use_sliding_window", "true"), "sliding_window", "1024"),
        with(with(llama_text, "attention_bias", "true"), "mlp_bias", "true"),
        with(llama_text, "rope_scaling", R"({"type": "yarn", "factor": 2, "mscale": 0.5, "attention_factor": 1.5})")}) {
    expect_same(parsed(hf_config_text(parsed(text), "bfloat16")), parsed(text));
  }
}

TEST(HfConfig, NumbersThatJsonHasNotAreReadAsPythonReadsThem) {
  const ModelConfig plain = parsed(llama_text);
  const std::string more = R"({"a": [NaN, -Infinity, {"b": Infinity}], "c": "NaN \" Infinity\\",)";
  expect_same(parsed(more + std::string(llama_text).substr(1)), plain);
  EXPECT_THAT(refusal(with(llama_text, "rms_norm_eps", "NaN")),
              HasSubstr("'rms_norm_eps' is \"NaN\", expected a number"));
  EXPECT_THAT(refusal(with(llama_text, "hidden_size", "-Infinity")), HasSubstr("'hidden_size' is \"-Infinity\""));
  EXPECT_THAT(refusal(R"({"a": Infinit})"), HasSubstr("not JSON"));
  EXPECT_THAT(refusal(R"({"a": "Infinity)"), HasSubstr("not JSON"));
  EXPECT_THAT(refusal("{\"a\": \"\\"), HasSubstr("not JSON"));
}

// Without, transformers would take its class's default, which a small vocabulary may not have.
TEST(HfConfig, TokensOfGenerationArePassedOnAndSoIsThatThereAreNone) {
  const std::string text = with(with(phi3_text, "pad_token_id", "null"), "eos_token_id", "[7, 8]");
  const std::string written = hf_config_text(parsed(text), "bfloat16");
  EXPECT_THAT(written, HasSubstr("\"pad_token_id\": null"));
  EXPECT_THAT(written, Not(HasSubstr("bos_token_id")));
  const std::vector<std::pair<std::string, std::string>> tokens = {{"eos_token_id", "[7,8]"}, {"pad_token_id", "null"}};
  EXPECT_EQ(parsed(written).passed_on, tokens);
}

TEST(HfConfig, TheNameIsTheFolders) {
  const TemporaryFolder folder;
  std::filesystem::create_directory(folder.path() / "my-model");
  EXPECT_EQ(read_hf_config(folder.write("my-model/config.json", gpt2_text)).config.name, "my-model");
}

TEST(BuiltinModels, AllAreValidAndFoundByName) {
  EXPECT_EQ(builtin_models().size(), 33U);
  for (const std::string& name : builtin_models()) {
    EXPECT_NO_THROW(builtin_model(name).validate()) << name;
    EXPECT_EQ(builtin_model(name).name, name);
  }
  EXPECT_THROW(builtin_model("gpt5"), UsageError);
  EXPECT_THROW(builtin_model(""), UsageError);
}

}  // namespace
}  // namespace tandem::testing
