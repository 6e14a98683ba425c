// config.json as transformers 4 and 5 write it, and what is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/error.hpp"
#include "models/config.hpp"
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

// As transformers 4 writes it.
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

ModelConfig parsed(const std::string& text) {
  const TemporaryFolder folder;
  return read_hf_config(folder.write("config.json", text));
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
  EXPECT_EQ(a.qk_norm, b.qk_norm);
  ASSERT_EQ(a.rope_scaling.has_value(), b.rope_scaling.has_value());
  EXPECT_EQ(a.rope_theta, b.rope_theta);
  if (!a.rope_scaling) return;
  EXPECT_EQ(a.rope_scaling->factor, b.rope_scaling->factor);
  EXPECT_EQ(a.rope_scaling->low_freq_factor, b.rope_scaling->low_freq_factor);
  EXPECT_EQ(a.rope_scaling->high_freq_factor, b.rope_scaling->high_freq_factor);
  EXPECT_EQ(a.rope_scaling->original_positions, b.rope_scaling->original_positions);
}

TEST(HfConfig, PublishedFilesGiveTheBuiltinShapes) {
  expect_same(parsed(gpt2_text), builtin_model("gpt2"));
  expect_same(parsed(llama_text), builtin_model("llama3.2-1b"));
  expect_same(parsed(qwen2_text), builtin_model("qwen2.5-0.5b"));
  expect_same(parsed(mistral_text), builtin_model("mistral-7b"));
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
  EXPECT_THAT(llama("attention_bias", "true"), HasSubstr("'attention_bias'"));
  EXPECT_THAT(llama("mlp_bias", "true"), HasSubstr("'mlp_bias'"));
  EXPECT_THAT(llama("num_local_experts", "8"), HasSubstr("experts"));
  EXPECT_THAT(llama("architectures", "[\"MixtralForCausalLM\"]"), HasSubstr("'MixtralForCausalLM'"));
  EXPECT_THAT(llama("partial_rotary_factor", "0.5"), HasSubstr("'partial_rotary_factor'"));
  EXPECT_THAT(llama("quantization_config", "{}"), HasSubstr("'quantization_config'"));
  EXPECT_THAT(llama("rope_scaling", R"({"rope_type": "yarn", "factor": 4.0})"), HasSubstr("'yarn'"));
  EXPECT_THAT(llama("rope_scaling", R"({"type": "linear", "factor": 4.0})"), HasSubstr("'linear'"));
  EXPECT_THAT(llama("rope_scaling", R"({"rope_type": "llama3", "factor": 4.0})"), HasSubstr("'low_freq_factor'"));
}

TEST(HfConfig, ASlidingWindowShorterThanThePositionsIsRefused) {
  EXPECT_THAT(refusal(with(mistral_text, "sliding_window", "4096")), HasSubstr("'sliding_window' is 4096"));
  EXPECT_EQ(refusal(with(mistral_text, "sliding_window", "32768")), "accepted");
  std::string absent = mistral_text;
  const std::string explicit_null = R"("sliding_window": null,)";
  absent.replace(absent.find(explicit_null), explicit_null.size(), "");
  EXPECT_THAT(refusal(absent), HasSubstr("'sliding_window' is 4096")) << "the class's default";
  EXPECT_THAT(refusal(with(with(qwen2_text, "use_sliding_window", "true"), "sliding_window", "1024")),
              HasSubstr("'sliding_window' is 1024"));
  EXPECT_EQ(refusal(with(qwen2_text, "sliding_window", "1024")), "accepted") << "not used";
  const std::string listed = with(qwen2_text, "layer_types", R"(["full_attention", "sliding_attention"])");
  EXPECT_THAT(refusal(with(listed, "sliding_window", "1024")), HasSubstr("'sliding_window' is 1024"));
  EXPECT_THAT(refusal(with(qwen2_text, "layer_types", R"(["linear_attention"])")), HasSubstr("'linear_attention'"));
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

TEST(HfConfig, WhatIsWrittenReadsBackTheSame) {
  for (const std::string& name : builtin_models()) {
    SCOPED_TRACE(name);
    const ModelConfig config = builtin_model(name);
    expect_same(parsed(hf_config_text(config, "bfloat16")), config);
  }
}

TEST(HfConfig, TheNameIsTheFolders) {
  const TemporaryFolder folder;
  std::filesystem::create_directory(folder.path() / "my-model");
  EXPECT_EQ(read_hf_config(folder.write("my-model/config.json", gpt2_text)).name, "my-model");
}

TEST(BuiltinModels, AllAreValidAndFoundByName) {
  EXPECT_EQ(builtin_models().size(), 20U);
  for (const std::string& name : builtin_models()) {
    EXPECT_NO_THROW(builtin_model(name).validate()) << name;
    EXPECT_EQ(builtin_model(name).name, name);
  }
  EXPECT_THROW(builtin_model("gpt5"), UsageError);
  EXPECT_THROW(builtin_model(""), UsageError);
}

}  // namespace
}  // namespace tandem::testing
