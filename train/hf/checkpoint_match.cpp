#include "train/hf/checkpoint_match.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/error.hpp"
#include "core/base/json_text.hpp"
#include "models/hf/hf_config.hpp"
#include "models/transformer/transformer.hpp"
#include "offload/engine/state_io.hpp"
#include "train/config/config.hpp"
#include "train/hf/lora_modules.hpp"
#include "train/hf/peft_config.hpp"
#include "train/hf/trained_layout.hpp"

namespace tandem {

ModelConfig config_of(const Checkpoint& checkpoint) {
  const Manifest& manifest = checkpoint.manifest();
  if (manifest.model_name.empty() && manifest.model_config == "{}") {  // saved by OffloadEngine::save
    throw InputError(fmt::format("checkpoint {}", checkpoint.directory().string()),
                     "a trainer of its own has saved it, and its manifest names no model",
                     "OffloadEngine::load reads it, and tandem digest");
  }
  try {
    return parse_hf_config(manifest.model_config, manifest.model_name);
  } catch (const UsageError& error) {
    throw InputError(fmt::format("checkpoint {}", checkpoint.directory().string()), error.what(),
                     "use another one of the run");
  }
}

namespace {

/// Keys of config.json that describe the function that the model computes: without names, initial values and storage of
/// weights, generation, and the longest sequence, which shapes tell where it matters.
nlohmann::json keys_of_the_function(const ModelConfig& config) {
  nlohmann::json json = parse_json<nlohmann::json>(hf_config_text(config, "float32"));
  for (const char* key :
       {"architectures", "model_type", "torch_dtype", "initializer_range", "max_position_embeddings"}) {
    json.erase(key);
  }
  for (const auto& [key, value] : config.passed_on) json.erase(key);
  json["rope_magnitude"] =
      rope_magnitude(config, config.rope(/*windowed=*/false));  // may come of how long sequences may be
  json["norm_offset"] = config.norm_offset;
  return json;
}

}  // namespace

void check_function(const Checkpoint& checkpoint, const ModelConfig& config) {
  const auto stored = keys_of_the_function(config_of(checkpoint));
  const auto given = keys_of_the_function(config);
  nlohmann::json all = given;
  all.update(stored);
  for (const auto& [key, any] : all.items()) {
    const nlohmann::json saved = stored.value(key, nlohmann::json()), value = given.value(key, nlohmann::json());
    if (saved == value) continue;
    throw InputError(fmt::format("checkpoint {}", checkpoint.directory().string()),
                     fmt::format("it was made with {} {}, the model has {}", key, json_text(saved), json_text(value)),
                     "resume with the model it was saved with");
  }
}

namespace {

/// Throws InputError where a checkpoint and a run do not leave out frozen parameters alike, or had them in other
/// formats.
void check_base_format(const Checkpoint& checkpoint, const ModelConfig& config, const ParameterLayout& layout) {
  const bool leaves_out = config.lora || base_format(layout) != WeightCode::none;
  const std::string own(leaves_out ? base_name(base_format(layout)) : ""), &stored = checkpoint.manifest().base_format;
  if (own == stored) return;
  const auto shown = [](const std::string& format) { return format.empty() ? "bf16" : format; };
  throw InputError(fmt::format("checkpoint {}", checkpoint.directory().string()),
                   fmt::format("it was made with --base {}, this run has {}", shown(stored), shown(own)),
                   "resume with its --base; for another begin a run with --model CHECKPOINT and another --out");
}

std::string listed(const std::vector<std::string>& names) {
  return names.empty() ? "none" : fmt::format("{}", fmt::join(names, ","));
}

/// Throws InputError where one of both trains a module whole that the other does not.
void check_saved_modules(const std::string& what, const std::vector<std::string>& stored, const ModelConfig& config,
                         const ParameterLayout& layout) {
  for (const Parameter* p : layout.owned_parameters()) {
    const bool saved = is_saved_module(config, *p, stored);
    if (is_adapter(*p) || saved == p->options.trainable) continue;
    throw InputError(what,
                     fmt::format("it was made with --lora-modules-to-save {}, and this run {} {} whole", listed(stored),
                                 saved ? "does not train" : "trains", module_of(config, *p)),
                     "leave the flag out, and the run goes on as it was begun");
  }
}

/// Throws InputError where a checkpoint and a model do not both have adapters of one description.
void check_adapters(const Checkpoint& checkpoint, const ModelConfig& config, const ParameterLayout& layout) {
  const std::string what = fmt::format("checkpoint {}", checkpoint.directory().string()),
                    &text = checkpoint.manifest().adapter;
  if (text.empty() != !config.lora) {
    throw InputError(what, text.empty() ? "it holds a model that was trained itself" : "it holds adapters",
                     text.empty() ? "leave out the --lora flags" : "resume with the --lora flags it was saved with");
  }
  if (text.empty()) return;
  const LoraOptions stored = parse_peft_config(text, checkpoint.directory().string()).options;
  const auto compare = [&](std::string_view name, const auto& saved, const auto& value) {
    if (saved == value) return;
    throw InputError(what, fmt::format("it was made with {} {}, this run has {}", name, saved, value),
                     "leave the flag out, and the run goes on as it was begun");
  };
  compare("--lora-rank", stored.rank, config.lora->rank);
  compare("--lora-dropout", stored.dropout.value_or(0.0), config.lora->dropout);
  compare("--lora-alpha", stored.alpha_or_default(), config.lora->alpha);
  compare("--lora-rslora", stored.rank_stabilized.value_or(false), config.lora->rank_stabilized);
  const LoraConfig made = lora_config(config, stored, fmt::format("{}: target_modules", what));
  compare("--lora-targets", listed(target_names(config, made)), listed(target_names(config, *config.lora)));
  compare("--lora-experts", listed(target_parameters(config, made)), listed(target_parameters(config, *config.lora)));
  check_saved_modules(what, stored.modules_to_save, config, layout);
}

}  // namespace

void check_resumable(const Checkpoint& checkpoint, const ModelConfig& config, const ParameterLayout& layout,
                     StateFormat state) {
  check_adapters(checkpoint, config, layout);
  check_belongs(checkpoint, layout, state);
  check_base_format(checkpoint, config, layout);
  check_function(checkpoint, config);
}

}  // namespace tandem
