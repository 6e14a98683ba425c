#include "models/hf/hf_config.hpp"

// Reading and writing Hugging Face config.json files. Whatever would change the mathematics and is not
// computed here is refused by the name of its field; a wrong model is worse than none.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "core/base/error.hpp"
#include "core/base/json_text.hpp"
#include "core/base/nesting.hpp"
#include "models/hf/hf_architectures.hpp"
#include "models/hf/hf_attention.hpp"
#include "models/hf/hf_experts.hpp"
#include "models/hf/hf_fields.hpp"
#include "models/hf/hf_rope.hpp"

namespace tandem {
namespace {

using Json = nlohmann::json;
using OrderedJson = nlohmann::ordered_json;

constexpr std::uintmax_t max_config_bytes = 16U << 20;

const HfArchitecture& architecture_of(const Fields& f) {
  const std::vector<std::string> listed = f.texts("architectures");
  const std::string model_type = f.text("model_type", "");
  const auto is = [&](std::string_view name, std::string_view type) {
    return !name.empty() && (listed.empty() ? type == model_type : name == listed.front());
  };
  std::string names;
  for (const HfArchitecture& a : hf_architectures) {
    if (is(a.name, a.model_type) || is(a.seeing, a.seeing_type)) return a;
    names += (names.empty() ? "" : ", ") + std::string(a.name);
  }
  const std::string what = listed.empty() ? fmt::format("model_type '{}'", model_type) : "'" + listed.front() + "'";
  f.refuse(fmt::format("the architecture {} is not supported", what), "use one of " + names);
}

/// Architecture of a model that was read, or is built in.
const HfArchitecture& architecture_of(const ModelConfig& c) {
  const auto found = std::ranges::find(hf_architectures, c.architecture, &HfArchitecture::name);
  if (found != std::end(hf_architectures)) return *found;
  throw MisuseError("description of a model", fmt::format("its architecture is '{}'", c.architecture));
}

/// Fields that may be there, but must not ask for anything else than `expected`.
void expect(const Fields& f, const char* key, bool expected) {
  if (f.boolean(key, expected) != expected) {
    f.refuse(fmt::format("'{}' is {}, which is not supported", key, !expected));
  }
}

void refuse_unsupported(const Fields& f) {
  for (const char* key : {"clip_qkv", "attn_logit_softcapping", "final_logit_softcapping"}) {
    if (f.has(key)) f.refuse(fmt::format("'{}' is not supported", key));
  }
  expect(f, "use_bidirectional_attention", false);
  if (f.has("quantization_config")) {
    f.refuse("'quantization_config': quantized weights are not supported", "use the model's bf16 or fp32 weights");
  }
}

void check_activation(const Fields& f, const char* key, std::initializer_list<std::string_view> supported) {
  const std::string name = f.text(key, std::string(*supported.begin()));
  for (const std::string_view s : supported) {
    if (name == s) return;
  }
  f.refuse(fmt::format("'{}' is '{}', supported is '{}'", key, name, *supported.begin()));
}

void read_gpt2(const Fields& f, ModelConfig& c) {
  check_activation(f, "activation_function", {"gelu_new", "gelu_pytorch_tanh"});
  expect(f, "scale_attn_weights", true);
  expect(f, "scale_attn_by_inverse_layer_idx", false);
  expect(f, "add_cross_attention", false);
  c.positions = f.integer("n_positions", f.integer("n_ctx", 0));
  if (c.positions == 0) f.refuse("'n_positions' is missing");
  c.width = f.integer("n_embd");
  c.layers = f.integer("n_layer");
  c.heads = c.kv_heads = f.integer("n_head");
  c.ffn = f.integer("n_inner", c.width > 0 && c.width < (std::int64_t{1} << 40) ? 4 * c.width : 0);
  c.head_dim = c.heads > 0 ? c.width / c.heads : 0;
}

/// A size that config.json may leave out if the class has a default, `fallback` above 0.
std::int64_t size(const Fields& f, const char* key, std::int64_t fallback) {
  return fallback > 0 ? f.integer(key, fallback) : f.integer(key);
}

/// A field that only some classes know: elsewhere it must not ask for anything.
bool bias(const Fields& f, const char* key, bool known) {
  if (!known) expect(f, key, false);
  return known && f.boolean(key, false);
}

void read_factors(const Fields& f, ModelConfig& c) {
  c.embedding_factor = f.number("embedding_multiplier", 1.0);
  c.residual_factor = f.number("residual_multiplier", 1.0);
  c.attention_scale = f.number("attention_multiplier", 1.0);
  c.logits_divisor = f.number("logits_scaling", 1.0);
}

/// The tanh form, also where the first files of Gemma name the other.
void check_gate(const Fields& f, Gate gate) {
  if (gate == Gate::silu) return check_activation(f, "hidden_act", {"silu", "swish"});
  check_activation(f, "hidden_activation", {"gelu_pytorch_tanh", "gelu_new"});
  check_activation(f, "hidden_act", {"gelu_pytorch_tanh", "gelu_new", "gelu"});
}

void read_llama(const Fields& f, const HfArchitecture& a, ModelConfig& c) {
  check_gate(f, a.gate);
  c.output_bias = bias(f, "attention_bias", a.attention_bias);
  c.qkv_bias = a.qkv_bias || c.output_bias;
  c.mlp_bias = bias(f, "mlp_bias", a.mlp_bias);
  c.qk_norm = a.qk_norm;
  c.gate = a.gate;
  c.norm_before = a.norm_before;
  c.norm_after = a.norm_after;
  c.norm_offset = a.norm_offset;
  c.fused_tensors = a.fused_tensors;
  c.scales_all = a.scales_all;
  c.positions = size(f, "max_position_embeddings", a.sizes.positions);
  c.width = f.integer("hidden_size");
  c.layers = f.integer("num_hidden_layers");
  c.heads = size(f, "num_attention_heads", a.sizes.heads);
  c.kv_heads = f.integer("num_key_value_heads", a.sizes.kv_heads > 0 ? a.sizes.kv_heads : c.heads);
  if (a.experts.count == 0) c.ffn = f.integer("intermediate_size");
  read_experts(f, a, c);
  if (a.factors) read_factors(f, c);
  if (a.scaled_embedding) c.embedding_factor = std::sqrt(static_cast<double>(c.width));
  if (a.query_pre_attn_scalar) {
    c.attention_scale = 1.0 / std::sqrt(static_cast<double>(f.integer("query_pre_attn_scalar", 256)));
  }
  const bool has_head_dim = f.has("head_dim") || a.sizes.head_dim > 0;
  if (!has_head_dim && c.heads > 0 && c.width % c.heads != 0) {
    f.refuse(fmt::format("'hidden_size' {} is not a multiple of 'num_attention_heads' {}", c.width, c.heads),
             "give 'head_dim'");
  }
  const std::int64_t derived = c.heads > 0 ? c.width / c.heads : 0;
  c.head_dim = f.integer("head_dim", a.sizes.head_dim > 0 ? a.sizes.head_dim : derived);
  read_attention(f, a, c);
  read_rope(f, a, c);
}

std::string read_text(const std::filesystem::path& file, const std::string& what) {
  std::error_code failed;
  if (!std::filesystem::is_regular_file(file, failed)) {
    throw UsageError(what, std::filesystem::exists(file, failed) ? "it is no regular file" : "there is no such file");
  }
  const std::uintmax_t bytes = std::filesystem::file_size(file, failed);
  if (failed) throw UsageError(what, failed.message());
  if (bytes > max_config_bytes) throw UsageError(what, fmt::format("{} bytes are too many for a config.json", bytes));
  std::ifstream in(file, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(in), {}};
  if (!in) throw UsageError(what, "it cannot be read");
  return text;
}

/// Python writes NaN, Infinity and -Infinity, which are no JSON. They become strings: a field that is read says so, and
/// the others are no matter.
std::string with_quoted_constants(std::string_view text) {
  constexpr std::array<std::string_view, 3> constants{"-Infinity", "Infinity", "NaN"};
  std::string result;
  bool quoted = false;
  for (std::size_t i = 0; i < text.size();) {
    const std::string_view rest = text.substr(i);
    const auto* const constant = std::ranges::find_if(constants, [&](auto c) { return rest.starts_with(c); });
    const std::size_t taken = quoted && text[i] == '\\'                ? 2
                              : !quoted && constant != constants.end() ? constant->size()
                                                                       : 1;
    const std::string_view part = rest.substr(0, taken);
    if (part == "\"") quoted = !quoted;
    result += !quoted && constant != constants.end() ? fmt::format("\"{}\"", part) : std::string(part);
    i += taken;
  }
  return result;
}

Json parse(std::string_view text, const std::string& what) {
  if (nests_deeper(text)) throw UsageError(what, "it is nested too deep");
  Json json = parse_json<Json>(with_quoted_constants(text));
  if (json.is_discarded()) throw UsageError(what, "it is not JSON");
  if (!json.is_object()) throw UsageError(what, "it is not a JSON object");
  return json;
}

std::string model_name(const std::filesystem::path& file) {
  std::error_code failed;
  const std::filesystem::path whole = std::filesystem::absolute(file, failed).lexically_normal();
  const std::string name = whole.parent_path().filename().string();
  return name.empty() ? "model" : name;
}

OrderedJson gpt2_fields(const ModelConfig& c) {
  return {{"n_positions", c.positions},
          {"n_ctx", c.positions},
          {"n_embd", c.width},
          {"n_layer", c.layers},
          {"n_head", c.heads},
          {"n_inner", c.ffn},
          {"activation_function", "gelu_new"},
          {"layer_norm_epsilon", c.norm_eps}};
}

OrderedJson llama_fields(const HfArchitecture& a, const ModelConfig& c) {
  OrderedJson json = {{"max_position_embeddings", c.positions},
                      {"hidden_size", c.width},
                      {"num_hidden_layers", c.layers},
                      {"num_attention_heads", c.heads},
                      {"num_key_value_heads", c.kv_heads},
                      {"head_dim", c.head_dim},
                      {"intermediate_size", c.ffn},
                      {"hidden_act", c.gate == Gate::gelu ? "gelu_pytorch_tanh" : "silu"},
                      {"rms_norm_eps", c.norm_eps}};
  if (c.gate == Gate::gelu) json["hidden_activation"] = json["hidden_act"];
  if (!a.qkv_bias) json["attention_bias"] = c.output_bias;  // false is taken by classes that do not know it, too
  if (c.mlp_bias) json["mlp_bias"] = true;
  json.update(expert_fields(a, c));
  const double scale = c.attention_scale.value_or(1.0 / std::sqrt(static_cast<double>(c.head_dim)));
  if (a.query_pre_attn_scalar) json["query_pre_attn_scalar"] = std::llround(1.0 / (scale * scale));
  if (a.factors) {
    json["embedding_multiplier"] = c.embedding_factor;
    json["residual_multiplier"] = c.residual_factor;
    json["attention_multiplier"] = scale;
    json["logits_scaling"] = c.logits_divisor;
  }
  json.update(attention_fields(a, c));
  json.update(rope_fields(c));
  return json;
}

std::string what_of(const std::string& name) { return fmt::format("model description {}", name); }

ModelConfig config_of(const Json& json, const std::string& name) {
  const std::string what = what_of(name);
  const Fields whole(json, what);
  const HfArchitecture& architecture = architecture_of(whole);
  const Json* const of_text = architecture.seeing.empty() ? nullptr : whole.object("text_config");
  const Fields f = of_text == nullptr ? whole : Fields(*of_text, what + ", 'text_config'");
  ModelConfig c;
  c.name = name;
  c.architecture = architecture.name;
  c.family = architecture.family;
  c.is_multimodal = of_text != nullptr;
  // Where "text_config" stands, this is said beside it, or nowhere.
  c.tied_head = f.boolean("tie_word_embeddings", whole.boolean("tie_word_embeddings", architecture.tied_head));
  const bool gpt2 = c.family == Family::gpt2;
  c.norm_eps = f.number(gpt2 ? "layer_norm_epsilon" : "rms_norm_eps", architecture.norm_eps);
  refuse_unsupported(f);
  c.vocabulary = size(f, "vocab_size", architecture.sizes.vocabulary);
  c.initializer_range = f.number("initializer_range", 0.02);
  for (const char* key : {"bos_token_id", "eos_token_id", "pad_token_id"}) {
    const Fields& said = whole.mentions(key) ? whole : f;
    if (const std::string ids = said.token_ids(key); !ids.empty()) c.passed_on.emplace_back(key, ids);
  }
  if (gpt2) {
    read_gpt2(f, c);
  } else {
    read_llama(f, architecture, c);
  }
  c.validate();
  return c;
}

}  // namespace

ModelConfig parse_hf_config(std::string_view text, const std::string& name) {
  return config_of(parse(text, what_of(name)), name);
}

HfDescription read_hf_config(const std::filesystem::path& config_json) {
  const std::string name = config_json.string();  // errors name the file
  Json json = parse(read_text(config_json, what_of(name)), what_of(name));
  HfDescription description;
  if (const auto found = json.find("quantization_config"); found != json.end() && !found->is_null()) {
    description.quantization = json_text(*found);
    json.erase(found);
  }
  description.config = config_of(json, name);
  description.config.name = model_name(config_json);
  const auto kind = json.find("tandem_token_kind");
  if (kind != json.end() && kind->is_string()) description.token_kind = kind->get<std::string>();
  return description;
}

std::string hf_config_text(const ModelConfig& config, std::string_view torch_dtype) {
  const HfArchitecture& architecture = architecture_of(config);
  OrderedJson json = {{"architectures", OrderedJson::array({config.architecture})},
                      {"model_type", architecture.model_type},
                      {"vocab_size", config.vocabulary},
                      {"initializer_range", config.initializer_range},
                      {"tie_word_embeddings", config.tied_head},
                      {"torch_dtype", torch_dtype}};
  json.update(config.family == Family::gpt2 ? gpt2_fields(config) : llama_fields(architecture, config));
  for (const auto& [key, value] : config.passed_on) json[key] = parse_json<OrderedJson>(value);
  return json_document(json);
}

}  // namespace tandem
