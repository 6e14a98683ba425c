// Reading and writing Hugging Face config.json files. Whatever would change the mathematics and is not
// computed here is refused by the name of its field; a wrong model is worse than none.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>

#include "core/error.hpp"
#include "core/nesting.hpp"
#include "models/config.hpp"

namespace tandem {
namespace {

using Json = nlohmann::json;
using OrderedJson = nlohmann::ordered_json;

constexpr std::uintmax_t max_config_bytes = 16U << 20;

/// Typed access to one JSON object. An explicit null counts as absent, as in transformers.
class Fields {
 public:
  Fields(const Json& object, std::string where) : object_(object), where_(std::move(where)) {}

  [[noreturn]] void refuse(std::string_view why, std::string_view advice = {}) const {
    throw UsageError(where_, why, advice);
  }

  bool has(const char* key) const { return find(key) != nullptr; }
  /// Also true of an explicit null.
  bool mentions(const char* key) const { return object_.contains(key); }

  std::int64_t integer(const char* key) const {
    const Json* value = find(key);
    if (value == nullptr) refuse(fmt::format("'{}' is missing", key));
    if (!value->is_number_integer()) refuse(fmt::format("'{}' is {}, expected an integer", key, shown(*value)));
    constexpr auto highest = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
    if (value->is_number_unsigned() && value->get<std::uint64_t>() > highest) {
      refuse(fmt::format("'{}' is {}, which no model has", key, shown(*value)));
    }
    return value->get<std::int64_t>();
  }
  std::int64_t integer(const char* key, std::int64_t fallback) const { return has(key) ? integer(key) : fallback; }

  double number(const char* key, double fallback) const {
    const Json* value = find(key);
    if (value == nullptr) return fallback;
    if (!value->is_number()) refuse(fmt::format("'{}' is {}, expected a number", key, shown(*value)));
    return value->get<double>();
  }

  bool boolean(const char* key, bool fallback) const {
    const Json* value = find(key);
    if (value == nullptr) return fallback;
    if (!value->is_boolean()) refuse(fmt::format("'{}' is {}, expected true or false", key, shown(*value)));
    return value->get<bool>();
  }

  std::string text(const char* key, std::string fallback) const {
    const Json* value = find(key);
    if (value == nullptr) return fallback;
    if (!value->is_string()) refuse(fmt::format("'{}' is {}, expected a string", key, shown(*value)));
    return value->get<std::string>();
  }

  /// The nested object, or null where absent.
  const Json* object(const char* key) const {
    const Json* value = find(key);
    if (value != nullptr && !value->is_object())
      refuse(fmt::format("'{}' is {}, expected {{...}}", key, shown(*value)));
    return value;
  }

  /// A token id or a list of them, as JSON; empty where absent.
  std::string token_ids(const char* key) const {
    const Json* value = find(key);
    if (value == nullptr) return {};
    const auto is_id = [](const Json& v) { return v.is_number_integer(); };
    if (!is_id(*value) && !(value->is_array() && std::all_of(value->begin(), value->end(), is_id))) {
      refuse(fmt::format("'{}' is {}, expected a token id or a list of them", key, shown(*value)));
    }
    return value->dump();
  }

  /// The list of strings, empty where absent.
  std::vector<std::string> texts(const char* key) const {
    std::vector<std::string> all;
    const Json* value = find(key);
    if (value == nullptr) return all;
    if (!value->is_array()) refuse(fmt::format("'{}' is {}, expected a list of strings", key, shown(*value)));
    for (const Json& item : *value) {
      if (!item.is_string()) refuse(fmt::format("'{}' is {}, expected a list of strings", key, shown(*value)));
      all.push_back(item.get<std::string>());
    }
    return all;
  }

  const std::string& where() const noexcept { return where_; }

 private:
  const Json* find(const char* key) const {
    const auto it = object_.find(key);
    return it == object_.end() || it->is_null() ? nullptr : &*it;
  }
  static std::string shown(const Json& value) {
    constexpr std::size_t longest = 60;
    std::string text = value.dump(-1, ' ', true, Json::error_handler_t::replace);
    return text.size() <= longest ? text : text.substr(0, longest) + "...";
  }

  const Json& object_;
  std::string where_;
};

struct Architecture {
  std::string_view name;
  std::string_view model_type;
  Family family;
};
constexpr Architecture known_architectures[] = {
    {"GPT2LMHeadModel", "gpt2", Family::gpt2},        {"LlamaForCausalLM", "llama", Family::llama},
    {"Qwen2ForCausalLM", "qwen2", Family::llama},     {"Qwen3ForCausalLM", "qwen3", Family::llama},
    {"MistralForCausalLM", "mistral", Family::llama},
};

const Architecture& architecture_of(const Fields& f) {
  const std::vector<std::string> listed = f.texts("architectures");
  const std::string model_type = f.text("model_type", "");
  for (const Architecture& a : known_architectures) {
    if (listed.empty() ? a.model_type == model_type : a.name == listed.front()) return a;
  }
  std::string names;
  for (const Architecture& a : known_architectures) names += (names.empty() ? "" : ", ") + std::string(a.name);
  const std::string what = listed.empty() ? fmt::format("model_type '{}'", model_type) : "'" + listed.front() + "'";
  f.refuse(fmt::format("the architecture {} is not supported", what), "use one of " + names);
}

/// Fields that may be there, but must not ask for anything else than `expected`.
void expect(const Fields& f, const char* key, bool expected) {
  if (f.boolean(key, expected) != expected) {
    f.refuse(fmt::format("'{}' is {}, which is not supported", key, !expected));
  }
}

void refuse_unsupported(const Fields& f) {
  if (f.has("quantization_config")) {
    f.refuse("'quantization_config': quantized weights are not supported", "use the model's bf16 or fp32 weights");
  }
  for (const char* key : {"num_experts", "num_local_experts", "n_routed_experts"}) {
    if (f.integer(key, 0) > 0) f.refuse(fmt::format("'{}': mixtures of experts are not supported", key));
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
  c.norm_eps = f.number("layer_norm_epsilon", 1e-5);
  c.tied_head = f.boolean("tie_word_embeddings", true);
  c.head_dim = c.heads > 0 ? c.width / c.heads : 0;
}

/// A window at least as long as the positions masks nothing. Mistral's has a default, which only an explicit
/// null switches off.
void check_sliding_window(const Fields& f, const ModelConfig& c) {
  const bool mistral = c.architecture == "MistralForCausalLM";
  constexpr std::int64_t default_window = 4096;
  bool used =
      mistral ? !f.mentions("sliding_window") || f.has("sliding_window") : f.boolean("use_sliding_window", false);
  for (const std::string& type : f.texts("layer_types")) {
    if (type != "full_attention" && type != "sliding_attention") {
      f.refuse(fmt::format("'layer_types' has '{}', which is not supported", type));
    }
    used = used || type == "sliding_attention";
  }
  if (!used) return;
  const std::int64_t window = f.integer("sliding_window", default_window);
  if (window < c.positions) {
    f.refuse(fmt::format("'sliding_window' is {}, shorter than the {} positions, which is not supported", window,
                         c.positions),
             fmt::format("set 'max_position_embeddings' to {}: up to there the window masks nothing", window));
  }
}

void read_rope_scaling(const Fields& f, ModelConfig& c) {
  const std::string type = f.text("rope_type", f.text("type", "default"));
  if (type == "default") return;
  if (type != "llama3") f.refuse(fmt::format("the RoPE type '{}' is not supported", type), "'default' or 'llama3'");
  for (const char* key : {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}) {
    if (!f.has(key)) f.refuse(fmt::format("'{}' is missing", key));
  }
  c.rope_scaling = Llama3RopeScaling{.factor = f.number("factor", 0),
                                     .low_freq_factor = f.number("low_freq_factor", 0),
                                     .high_freq_factor = f.number("high_freq_factor", 0),
                                     .original_positions = f.number("original_max_position_embeddings", 0)};
}

/// transformers 4: rope_theta beside rope_scaling; 5: both inside rope_parameters.
void read_rope(const Fields& f, ModelConfig& c) {
  c.rope_theta = f.number("rope_theta", 10000.0);
  if (f.number("partial_rotary_factor", 1.0) != 1.0) f.refuse("'partial_rotary_factor' is not supported");
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    const Json* nested = f.object(key);
    if (nested == nullptr) continue;
    const Fields inner(*nested, fmt::format("{}, '{}'", f.where(), key));
    c.rope_theta = inner.number("rope_theta", c.rope_theta);
    if (inner.number("partial_rotary_factor", 1.0) != 1.0) inner.refuse("'partial_rotary_factor' is not supported");
    read_rope_scaling(inner, c);
  }
}

void read_llama(const Fields& f, ModelConfig& c) {
  check_activation(f, "hidden_act", {"silu", "swish"});
  expect(f, "mlp_bias", false);
  expect(f, "attention_bias", false);
  c.qkv_bias = c.architecture == "Qwen2ForCausalLM";
  c.qk_norm = c.architecture == "Qwen3ForCausalLM";
  c.positions = f.integer("max_position_embeddings");
  c.width = f.integer("hidden_size");
  c.layers = f.integer("num_hidden_layers");
  c.heads = f.integer("num_attention_heads");
  c.kv_heads = f.integer("num_key_value_heads", c.heads);
  c.ffn = f.integer("intermediate_size");
  c.norm_eps = f.number("rms_norm_eps", 1e-6);
  c.tied_head = f.boolean("tie_word_embeddings", false);
  if (!f.has("head_dim") && c.heads > 0 && c.width % c.heads != 0) {
    f.refuse(fmt::format("'hidden_size' {} is not a multiple of 'num_attention_heads' {}", c.width, c.heads),
             "give 'head_dim'");
  }
  c.head_dim = f.integer("head_dim", c.heads > 0 ? c.width / c.heads : 0);
  check_sliding_window(f, c);
  read_rope(f, c);
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

Json parse(std::string_view text, const std::string& what) {
  if (nests_deeper(text)) throw UsageError(what, "it is nested too deep");
  Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
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

OrderedJson llama_fields(const ModelConfig& c) {
  OrderedJson json = {{"max_position_embeddings", c.positions},
                      {"hidden_size", c.width},
                      {"num_hidden_layers", c.layers},
                      {"num_attention_heads", c.heads},
                      {"num_key_value_heads", c.kv_heads},
                      {"head_dim", c.head_dim},
                      {"intermediate_size", c.ffn},
                      {"hidden_act", "silu"},
                      {"rms_norm_eps", c.norm_eps},
                      {"rope_theta", c.rope_theta},
                      {"rope_scaling", nullptr}};
  if (c.architecture == "MistralForCausalLM") json["sliding_window"] = nullptr;
  if (!c.qkv_bias) json["attention_bias"] = false;
  if (c.rope_scaling) {
    json["rope_scaling"] = {
        {"rope_type", "llama3"},
        {"factor", c.rope_scaling->factor},
        {"low_freq_factor", c.rope_scaling->low_freq_factor},
        {"high_freq_factor", c.rope_scaling->high_freq_factor},
        {"original_max_position_embeddings", static_cast<std::int64_t>(c.rope_scaling->original_positions)}};
  }
  return json;
}

}  // namespace

ModelConfig parse_hf_config(std::string_view text, const std::string& name) {
  const std::string what = fmt::format("model description {}", name);
  const Json json = parse(text, what);
  const Fields f(json, what);
  const Architecture& architecture = architecture_of(f);
  ModelConfig c;
  c.name = name;
  c.architecture = architecture.name;
  c.family = architecture.family;
  refuse_unsupported(f);
  c.vocabulary = f.integer("vocab_size");
  c.initializer_range = f.number("initializer_range", 0.02);
  for (const char* key : {"bos_token_id", "eos_token_id", "pad_token_id"}) {
    if (const std::string ids = f.token_ids(key); !ids.empty()) c.special_tokens.emplace_back(key, ids);
  }
  if (c.family == Family::gpt2) {
    read_gpt2(f, c);
  } else {
    read_llama(f, c);
  }
  c.validate();
  return c;
}

ModelConfig read_hf_config(const std::filesystem::path& config_json) {
  const std::string name = config_json.string();  // what is wrong is said of the file
  ModelConfig c = parse_hf_config(read_text(config_json, fmt::format("model description {}", name)), name);
  c.name = model_name(config_json);
  return c;
}

std::string hf_config_text(const ModelConfig& config, std::string_view torch_dtype) {
  std::string_view model_type = "gpt2";
  for (const Architecture& a : known_architectures) {
    if (a.name == config.architecture) model_type = a.model_type;
  }
  OrderedJson json = {{"architectures", OrderedJson::array({config.architecture})},
                      {"model_type", model_type},
                      {"vocab_size", config.vocabulary},
                      {"initializer_range", config.initializer_range},
                      {"tie_word_embeddings", config.tied_head},
                      {"torch_dtype", torch_dtype}};
  json.update(config.family == Family::gpt2 ? gpt2_fields(config) : llama_fields(config));
  for (const auto& [key, value] : config.special_tokens) json[key] = OrderedJson::parse(value);
  return json.dump(2) + "\n";
}

}  // namespace tandem
