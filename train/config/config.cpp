#include "train/config/config.hpp"

#include <fmt/format.h>

#define TOML_EXCEPTIONS 1
#include <toml++/toml.h>

#include <algorithm>
#include <array>

#include "core/base/error.hpp"
#include "core/base/mapped_file.hpp"
#include "core/base/toml_text.hpp"

namespace tandem {
namespace {

std::string toml_text(std::string_view text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      result += '\\';
      result += c;
    } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
      result += fmt::format("\\u{:04x}", static_cast<unsigned>(c));
    } else {
      result += c;
    }
  }
  return result + '"';
}

[[noreturn]] void bad_value(const ConfigField& field, std::string_view value, std::string_view why) {
  throw UsageError(
      fmt::format("--{} {}", field.name, value), why,
      field.example.empty() ? std::string() : fmt::format("for example --{} {}", field.name, field.example));
}

std::string text_of(const ConfigField& field, const toml::node& node) {
  if (const auto* text = node.as_string()) return text->get();
  if (const auto* number = node.as_integer()) return std::to_string(number->get());
  if (const auto* number = node.as_floating_point()) return fmt::format("{}", number->get());
  if (const auto* truth = node.as_boolean()) return truth->get() ? "true" : "false";
  throw UsageError(fmt::format("configuration key {}", field.name), "neither a text, a number nor a truth value");
}

std::vector<std::string> texts_of(const ConfigField& field, const toml::node& node) {
  std::vector<std::string> texts;
  if (const auto* array = node.as_array()) {
    for (const toml::node& element : *array) texts.push_back(text_of(field, element));
  } else {
    texts.push_back(text_of(field, node));
  }
  return texts;
}

toml::table parse_toml(const std::filesystem::path& file) {
  const MappedFile mapped(file);
  const std::string what = fmt::format("configuration {}", file.string());
  const std::string_view text(reinterpret_cast<const char*>(mapped.bytes().data()), mapped.bytes().size());
  try {
    return toml::parse(toml_in_ascii(text, what));
  } catch (const toml::parse_error& error) {
    throw UsageError(what, fmt::format("line {}: {}", error.source().begin.line, error.description()));
  }
}

/// The flag `--clip` has a second name.
constexpr std::string_view clip_key = "clip";
constexpr std::string_view clip_alias = "grad-clip";
/// Flags of training that say how to run, not what.
constexpr std::array<std::string_view, 5> flags_only{"config", "dry-run", "log-level", "quiet", "resume"};

[[noreturn]] void refuse_key(const std::string& what, std::string_view name) {
  if (std::ranges::find(flags_only, name) != flags_only.end()) {
    throw UsageError(what, fmt::format("{} is a flag only, no key", name), fmt::format("give --{} itself", name));
  }
  throw UsageError(what, fmt::format("unknown key {}", name),
                   "the keys are the names of the flags of `tandem train --help`");
}

}  // namespace

void set_config_field(TrainConfig& config, const ConfigField& field, const std::vector<std::string>& values) {
  const bool list = field.kind == ConfigField::Kind::list;
  if (values.empty() || (!list && values.size() != 1)) {
    bad_value(field, values.empty() ? "" : values.front(), list ? "needs a value" : "needs one value");
  }
  try {
    if (list) {
      TrainConfig fresh;
      for (const auto& value : values) field.set(fresh, value);
      if (field.name == "data") {
        config.data = fresh.data;
      } else if (field.name == "mix") {
        config.mix = fresh.mix;
      } else {
        config.eval_data = fresh.eval_data;
      }
      return;
    }
    field.set(config, values.front());
  } catch (const UsageError& error) {
    throw UsageError(fmt::format("--{}", field.name), error.what());
  }
}

std::string config_toml(const TrainConfig& config) {
  std::string text =
      "# Made by tandem, the flags this run had last: `tandem train --config FILE --out OTHER`. Flags win over it.\n";
  for (const ConfigField& field : config_fields()) {
    const auto values = field.get(config);
    if (values.empty()) continue;
    text += fmt::format("{} = ", field.name);
    if (field.kind == ConfigField::Kind::list) {
      std::string elements;
      for (const auto& value : values) elements += (elements.empty() ? "" : ", ") + toml_text(value);
      text += "[" + elements + "]\n";
    } else {
      text += (field.kind == ConfigField::Kind::text ? toml_text(values.front()) : values.front()) + "\n";
    }
  }
  return text;
}

void read_config_toml(const std::filesystem::path& file, TrainConfig& config) {
  const toml::table table = parse_toml(file);
  const std::string what = fmt::format("configuration {}", file.string());
  if (table.contains(clip_key) && table.contains(clip_alias)) {
    throw UsageError(what, fmt::format("{} and {} are the same, and both given", clip_key, clip_alias), "give one");
  }
  for (const auto& [key, node] : table) {
    const std::string_view name = key.str();
    const ConfigField* field = find_config_field(name == clip_alias ? clip_key : name);
    if (field == nullptr) refuse_key(what, name);
    set_config_field(config, *field, texts_of(*field, node));
  }
}

std::string_view why_none_speculates(const TrainConfig& c) noexcept {
  if (c.clip == 0.0 && c.on_nonfinite == OnNonfinite::stop) {
    return "with --clip 0 --on-nonfinite stop no update waits for the gradient norm";
  }
  if (is_lion(c.state)) return "updates of --state lion cannot be taken back";
  if (c.beta1 < 0.5 || c.beta2 < 0.5) return "updates with a beta below 0.5 cannot be taken back";
  if (c.lr.value_or(0.0) * c.weight_decay > 0.5) {
    return "updates with --lr times --weight-decay above 0.5 cannot be taken back";
  }
  return {};
}

/// Throws UsageError where adapters are described and there is neither a rank nor an adapter to go on from.
void check_adapters(const TrainConfig& c) {
  if (c.lora.rank > 0 || !c.adapter.empty() || c.lora == LoraOptions{}) return;
  const std::string_view flag = c.lora.alpha                      ? "--lora-alpha"
                                : !c.lora.targets.empty()         ? "--lora-targets"
                                : !c.lora.experts.empty()         ? "--lora-experts"
                                : c.lora.dropout                  ? "--lora-dropout"
                                : !c.lora.modules_to_save.empty() ? "--lora-modules-to-save"
                                                                  : "--lora-rslora";
  throw UsageError(flag, "there is no --lora-rank, so no adapter is trained", "give one, for example --lora-rank 16");
}

/// Throws UsageError where a field is set that says something only beside another.
void check_dependents(const TrainConfig& c) {
  const TrainConfig unset;
  const auto require = [](bool set, bool counts, std::string_view flag, std::string_view other) {
    if (set && !counts) throw UsageError(flag, fmt::format("it says nothing without {}", other), "give both, or none");
  };
  const bool fp8 = c.compute == ComputeType::fp8, dpo = c.objective == Objective::dpo;
  require(c.fp8_gradients != unset.fp8_gradients, fp8, "--fp8-gradients", "--compute fp8");
  require(c.fp8_accumulation != unset.fp8_accumulation, fp8, "--fp8-accumulation", "--compute fp8");
  require(c.dpo_beta != unset.dpo_beta, dpo, "--dpo-beta", "--objective dpo");
  require(c.dpo_reference != unset.dpo_reference, dpo, "--dpo-reference", "--objective dpo");
}

void check_config(const TrainConfig& c) {
  if (c.model.empty())
    throw UsageError("--model", "missing", "for example --model tiny-gpt2; --list-models names the shapes");
  if (!c.data.empty() && !c.mix.empty()) throw UsageError("--data and --mix", "both given", "give one of them");
  if (c.steps > 0 && c.epochs > 0) throw UsageError("--steps and --epochs", "both given", "give one of them");
  if (c.lr && c.min_lr && *c.min_lr > *c.lr) {
    throw UsageError("--min-lr", fmt::format("{} is above --lr {}", *c.min_lr, *c.lr), "give a smaller one");
  }
  if (c.objective == Objective::dpo && c.micro_batch % 2 != 0) {
    throw UsageError(fmt::format("--micro-batch {}", c.micro_batch), "--objective dpo learns pairs of sequences",
                     "give an even number, such as --micro-batch 2");
  }
  if (c.objective == Objective::dpo && !c.mix.empty()) {
    throw UsageError("--mix", "--objective dpo has one source of pairs", "prepare all to one file for --data");
  }
  if (c.patience > 0 && c.eval_every == 0) {
    throw UsageError("--patience", "there is no --eval-every", "give it, and --eval-data");
  }
  check_adapters(c);
  check_dependents(c);
  const std::string_view waits = why_none_speculates(c);
  if (c.speculate == Speculate::on && !waits.empty()) throw UsageError("--speculate on", waits, "leave it out");
}

}  // namespace tandem
