#include "train/hf/peft_config.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>

#include "core/base/error.hpp"
#include "core/base/json_text.hpp"
#include "core/base/nesting.hpp"
#include "train/config/lora_targets.hpp"
#include "train/config/name_pattern.hpp"
#include "train/hf/lora_modules.hpp"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

[[noreturn]] void refuse(const std::string& where, const std::string& why, std::string_view advice) {
  throw UsageError(fmt::format("adapter {}", where), why, advice);
}

/// Fields that change nothing of what an adapter computes, or that are read below.
constexpr std::array read_or_neutral{"auto_mapping",
                                     "base_model_name_or_path",
                                     "revision",
                                     "task_type",
                                     "peft_type",
                                     "peft_version",
                                     "inference_mode",
                                     "fan_in_fan_out",
                                     "megatron_core",
                                     "qalora_group_size",
                                     "eva_config",
                                     "ensure_weight_tying",
                                     "r",
                                     "lora_alpha",
                                     "lora_dropout",
                                     "use_rslora",
                                     "target_modules",
                                     "target_parameters",
                                     "layers_to_transform",
                                     "layers_pattern",
                                     "exclude_modules",
                                     "rank_pattern",
                                     "alpha_pattern",
                                     "modules_to_save",
                                     "bias",
                                     "init_lora_weights"};

/// Whether a field's value asks for nothing.
bool is_off(const Json& value) {
  if (value.is_null() || value == Json(false)) return true;
  return (value.is_array() || value.is_object() || value.is_string()) && value.size() == 0;
}

/// Initial values that change the base's weights too, so that the adapter belongs to no published base.
bool changes_base(const Json& initial) {
  if (!initial.is_string()) return false;
  const auto& name = initial.get_ref<const std::string&>();
  constexpr std::array harmless{"gaussian", "orthogonal", "eva"};
  return std::ranges::none_of(harmless, [&](const char* h) { return name == h; });
}

std::int64_t rank_in(const Json& value, const std::string& what, const std::string& where) {
  if (!value.is_number_integer() || value.get<double>() < 1.0 || value.get<double>() > 65536.0) {
    refuse(where, fmt::format("{} is {}", what, json_text(value)), "a rank is a whole number from 1 to 65536");
  }
  return value.get<std::int64_t>();
}

double number_in(const Json& value, const std::string& what, const std::string& where) {
  if (value.is_number() && std::isfinite(value.get<double>())) return value.get<double>();
  refuse(where, fmt::format("{} is no number", what), "write one");
}

std::int64_t rank_of(const Json& json, const std::string& where) {
  const auto rank = json.find("r");
  return rank == json.end() ? 8 : rank_in(*rank, "its rank (r)", where);  // PEFT's own
}

double number_of(const Json& json, const char* key, double otherwise, const std::string& where) {
  const auto value = json.find(key);
  return value == json.end() ? otherwise : number_in(*value, fmt::format("its {}", key), where);
}

/// Values by regular expressions, in their order. `read(value, what, where)` reads one.
template <class T>
std::vector<std::pair<std::string, T>> patterns_of(const Json& json, const char* key, const std::string& where,
                                                   T (*read)(const Json&, const std::string&, const std::string&)) {
  std::vector<std::pair<std::string, T>> patterns;
  const auto values = json.find(key);
  if (values == json.end() || is_off(*values)) return patterns;
  if (!values->is_object()) refuse(where, fmt::format("its {} is no object", key), "write one");
  for (const auto& [pattern, value] : values->items()) {
    try {
      static_cast<void>(name_pattern(pattern));
    } catch (const UsageError& error) {
      refuse(where, fmt::format("its {}: {}", key, error.what()), "");
    }
    patterns.emplace_back(pattern, read(value, fmt::format("its {} of {}", key, pattern), where));
  }
  return patterns;
}

std::vector<std::string> names_of(const Json& json, const char* key, const std::string& where) {
  std::vector<std::string> names;
  const auto value = json.find(key);
  if (value == json.end() || is_off(*value)) return names;
  if (!value->is_array()) refuse(where, fmt::format("its {} is no list of names", key), "write one");
  for (const Json& name : *value) {
    if (!name.is_string() || name.get_ref<const std::string&>().empty()) {
      refuse(where, fmt::format("its {} is no list of names", key), "write one");
    }
    names.push_back(name.get<std::string>());
  }
  std::ranges::sort(names);
  return names;
}

/// A field's value, or null.
Json value_of(const Json& json, const char* key) { return json.value(key, Json()); }

/// An expression of any of these names.
std::string any_of(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) {
    text += text.empty() ? "" : "|";
    for (const char c : name) {
      const bool plain = (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || c == '_';
      text += plain ? std::string(1, c) : fmt::format("\\{}", c);
    }
  }
  return "(" + text + ")";
}

/// Numbers of the blocks that have adapters.
std::vector<std::string> layers_of(const Json& json, const std::string& where) {
  const Json value = value_of(json, "layers_to_transform");
  std::vector<std::string> layers;
  for (const Json& layer : value.is_array() ? value : Json::array({value})) {
    if (!layer.is_number_unsigned()) refuse(where, "its layers_to_transform are no numbers of layers", "write some");
    layers.push_back(json_text(layer));
  }
  return layers;
}

/// An expression that looks ahead whether a name is in one of the layers_to_transform.
std::string in_layers(const Json& json, const std::string& where) {
  const Json pattern = value_of(json, "layers_pattern");
  for (const Json& name : pattern.is_array() ? pattern : Json::array({pattern})) {
    if (is_off(name) || name == Json("layers") || name == Json("h")) continue;
    refuse(where, fmt::format("its layers_pattern is {}", json_text(pattern)),
           "blocks lie in layers, and GPT-2's in h");
  }
  return fmt::format(R"((?=(.*\.)?(layers|h)\.{}\.))", any_of(layers_of(json, where)));
}

/// An expression that looks ahead whether a name is none of the exclude_modules.
std::string not_excluded(const Json& json, const std::string& where) {
  const Json value = value_of(json, "exclude_modules");
  if (is_off(value)) return {};
  if (value.is_string()) return fmt::format("(?!({})$)", value.get<std::string>());
  return fmt::format(R"((?!(.*\.)?{}$))", any_of(names_of(json, "exclude_modules", where)));
}

/// Text of --lora-targets: names, or an expression of names in those layers and not among those excluded. An exact name
/// is found in every layer, as in PEFT.
std::string text_of_targets(const Json& json, const std::string& where) {
  const Json value = value_of(json, "target_modules");
  const std::string excluded = not_excluded(json, where);
  const bool in_some = !is_off(value_of(json, "layers_to_transform"));
  if (value.is_string()) {
    const auto text = value.get<std::string>();
    if (in_some) refuse(where, "its layers_to_transform are beside an expression", "name the layers in that");
    if (!excluded.empty() && text == "all-linear") refuse(where, "its exclude_modules are beside all-linear", "");
    return excluded.empty() ? text : fmt::format("{}({})", excluded, text);
  }
  const std::vector<std::string> names = names_of(json, "target_modules", where);
  if (!in_some && excluded.empty()) return fmt::format("{}", fmt::join(names, ","));
  const std::string any = any_of(names), ahead = in_some ? in_layers(json, where) : std::string();
  return fmt::format(R"({}({}|{}(.*\.)?{}))", excluded, any, ahead, any);
}

/// Text of --lora-experts.
std::string experts_of(const Json& json, const std::string& where) {
  const std::string text = fmt::format("{}", fmt::join(names_of(json, "target_parameters", where), ","));
  try {
    static_cast<void>(parse_lora_experts(text));
  } catch (const UsageError& error) {
    refuse(where, fmt::format("its target_parameters: {}", error.what()), "");
  }
  return text;
}

/// Text of --lora-targets, checked.
std::string targets_of(const Json& json, const std::string& where) {
  if (is_off(value_of(json, "target_modules"))) {
    if (!is_off(value_of(json, "target_parameters"))) return "none";
    refuse(where, "it names no target_modules", "write those that it was trained with");
  }
  const std::string text = text_of_targets(json, where);
  try {
    static_cast<void>(parse_lora_targets(text));
  } catch (const UsageError& error) {
    refuse(where, fmt::format("its target_modules: {}", error.what()), "");
  }
  return text;
}

void check_method(const Json& json, const std::string& where) {
  constexpr std::string_view merged = "merge it into its base with PEFT (merge_and_unload, then save_pretrained)";
  if (const Json type = json.value("peft_type", Json("LORA")); type != Json("LORA")) {
    refuse(where, fmt::format("its peft_type is {}, and only LORA is done", json_text(type)), merged);
  }
  if (const Json bias = json.value("bias", Json("none")); bias != Json("none")) {
    refuse(where, fmt::format("it trains biases (bias is {}), which is not done", json_text(bias)), merged);
  }
  if (const Json initial = json.value("init_lora_weights", Json(true)); changes_base(initial)) {
    refuse(where, fmt::format("init_lora_weights {} has changed the base's own weights", json_text(initial)), merged);
  }
  for (const auto& [key, value] : json.items()) {
    const std::string& name = key;  // a lambda captures no part of a pair
    const auto is_it = [&](const char* known) { return name == known; };
    if (std::ranges::any_of(read_or_neutral, is_it) || is_off(value)) continue;
    refuse(where, fmt::format("its {} is {}, which is not done", key, json_text(value)), merged);
  }
}

/// Modules that are saved whole; PEFT has two of a tied table.
std::vector<std::string> saved_modules(const ModelConfig& config, const LoraOptions& options) {
  std::vector<std::string> modules = options.modules_to_save;
  if (!config.tied_head) return modules;
  const std::array<std::string, 2> ends{config.family == Family::gpt2 ? "wte" : "embed_tokens", "lm_head"};
  const auto ends_so = [&](const std::string& end) {
    return std::ranges::any_of(modules, [&](const std::string& m) { return end.ends_with(m) || m.ends_with(end); });
  };
  const bool embedding = ends_so(ends[0]), head = ends_so(ends[1]);
  if (embedding != head) modules.push_back(ends[embedding ? 1 : 0]);
  return modules;
}

}  // namespace

PeftConfig parse_peft_config(std::string_view text, const std::string& where) {
  const Json json = nests_deeper(text) ? Json() : parse_json<Json>(text);
  if (!json.is_object()) refuse(where, "its adapter_config.json is no JSON object", "copy it again");
  check_method(json, where);
  PeftConfig config;
  config.options.rank = rank_of(json, where);
  config.options.alpha = number_of(json, "lora_alpha", 8.0, where);  // PEFT's own
  config.options.dropout = number_of(json, "lora_dropout", 0.0, where);
  if (*config.options.dropout < 0.0 || *config.options.dropout >= 1.0) {
    refuse(where, fmt::format("its lora_dropout is {}", *config.options.dropout), "it is from 0 to below 1");
  }
  config.options.rank_stabilized = json.value("use_rslora", Json(false)) == Json(true);
  config.options.targets = targets_of(json, where);
  config.options.experts = experts_of(json, where);
  config.options.rank_pattern = patterns_of(json, "rank_pattern", where, rank_in);
  config.options.alpha_pattern = patterns_of(json, "alpha_pattern", where, number_in);
  config.options.modules_to_save = names_of(json, "modules_to_save", where);
  const Json base = json.value("base_model_name_or_path", Json());
  if (base.is_string()) config.base = base.get<std::string>();
  config.tied_modules = json.value("ensure_weight_tying", Json(false)) == Json(true);
  return config;
}

std::string peft_config_text(const ModelConfig& config, const LoraOptions& options, const std::string& base) {
  const LoraConfig& lora = config.lora.value();
  const Json modules = options.modules_to_save.empty() ? Json(nullptr) : Json(saved_modules(config, options));
  Json json{{"peft_type", "LORA"},
            {"task_type", "CAUSAL_LM"},
            {"base_model_name_or_path", base.empty() ? Json(nullptr) : Json(base)},
            {"inference_mode", true},
            {"r", lora.rank},
            {"lora_alpha", lora.alpha},
            {"lora_dropout", lora.dropout},
            {"use_rslora", lora.rank_stabilized},
            {"target_modules", target_names(config, lora)},
            {"modules_to_save", modules},
            {"bias", "none"},
            {"fan_in_fan_out", config.family == Family::gpt2},
            {"use_dora", false}};
  if (const auto parameters = target_parameters(config, lora); !parameters.empty()) {
    json["target_parameters"] = parameters;
  }
  for (const auto& [pattern, rank] : options.rank_pattern) json["rank_pattern"][pattern] = rank;
  for (const auto& [pattern, alpha] : options.alpha_pattern) json["alpha_pattern"][pattern] = alpha;
  return json_document(json);
}

}  // namespace tandem
