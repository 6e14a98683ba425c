// Fields of low-rank adapters, and of the format of frozen weights.
#include <fmt/ranges.h>

#include <algorithm>
#include <array>

#include "train/config/field_kinds.hpp"
#include "train/config/lora_targets.hpp"

namespace tandem {
namespace fields {
namespace {

std::vector<std::string> shown(bool set, std::string text) {
  return set ? std::vector{std::move(text)} : std::vector<std::string>{};
}

bool truth(std::string_view value) {
  if (value != "true" && value != "false") out_of_range(value, "true or false");
  return value == "true";
}

double number_in(std::string_view value, double least, double below) {
  const double x = parse_number(value);
  if (x < least || x >= below) out_of_range(value, fmt::format("a number from {} to below {}", least, below));
  return x;
}

using BaseFormat = std::pair<std::string_view, WeightCode>;
constexpr std::array base_formats{BaseFormat{"bf16", WeightCode::none}, BaseFormat{"int8", WeightCode::int8},
                                  BaseFormat{"nf4", WeightCode::nf4}, BaseFormat{"nf4-double", WeightCode::nf4_double},
                                  BaseFormat{"fp8", WeightCode::fp8}};

/// A text that `parse` must understand.
ConfigField targets(const Words& w, std::string LoraOptions::*member, LoraTargets (*parse)(std::string_view)) {
  const auto set = [=](TrainConfig& c, std::string_view v) {
    if (v.empty()) out_of_range(v, "names with commas between them, a regular expression, or a word of --help");
    const LoraTargets read = parse(v);
    c.lora.*member = read.names.empty() ? std::string(v) : fmt::format("{}", fmt::join(read.names, ","));
  };
  return field(w, Kind::text, set, [=](const auto& c) { return shown(!(c.lora.*member).empty(), c.lora.*member); });
}

}  // namespace

void add_adapter_fields(std::vector<ConfigField>& all) {
  using C = TrainConfig;
  all.push_back(field(
      {"lora-rank", "RANK", "none: all weights are trained", "16",
       "train low-rank adapters of this rank, and not the model's own weights"},
      Kind::number,
      [](C& c, std::string_view v) {
        c.lora.rank = parse_integer(v);
        if (c.lora.rank < 1 || c.lora.rank > 1 << 16) out_of_range(v, "1 to 65536");
      },
      [](const C& c) { return shown(c.lora.rank > 0, std::to_string(c.lora.rank)); }));
  all.push_back(field(
      {"lora-alpha", "ALPHA", "twice the rank", "32", "adapters count alpha / rank times"}, Kind::number,
      [](C& c, std::string_view v) {
        c.lora.alpha = number_in(v, 0.0, 1e6);
        if (*c.lora.alpha == 0.0) out_of_range(v, "a number above 0");
      },
      [](const C& c) { return shown(c.lora.alpha.has_value(), print_number(c.lora.alpha.value_or(0.0))); }));
  all.push_back(targets(
      {"lora-targets", "NAMES|REGEX", "all-linear: all of blocks but routers and experts", "q_proj,v_proj",
       "linear layers that have adapters: names with commas between them, a regular expression that whole names match, "
       "such as .*\\.[0-3]\\.mlp\\..*, or none"},
      &LoraOptions::targets, parse_lora_targets));
  all.push_back(targets(
      {"lora-experts", "NAMES", "none", "all",
       "matrices of experts that have adapters too, as PEFT's target_parameters: all, or gate_up_proj or down_proj"},
      &LoraOptions::experts, parse_lora_experts));
  all.push_back(field(
      {"lora-dropout", "SHARE", "0", "0.05", "share of the inputs of adapters that is set to zero in training"},
      Kind::number, [](C& c, std::string_view v) { c.lora.dropout = number_in(v, 0.0, 1.0); },
      [](const C& c) { return shown(c.lora.dropout.has_value(), print_number(c.lora.dropout.value_or(0.0))); }));
  all.push_back(field(
      {"lora-rslora", "", "off", "", "adapters count alpha / sqrt(rank) times"}, Kind::boolean,
      [](C& c, std::string_view v) { c.lora.rank_stabilized = truth(v); },
      [](const C& c) {
        return shown(c.lora.rank_stabilized.has_value(), c.lora.rank_stabilized.value_or(false) ? "true" : "false");
      }));
  all.push_back(field(
      {"lora-modules-to-save", "NAMES", "none", "embed_tokens,lm_head",
       "modules whose names end so are trained whole, and saved with the adapters"},
      Kind::text, [](C& c, std::string_view v) { c.lora.modules_to_save = names_in_list(v); },
      [](const C& c) {
        return shown(!c.lora.modules_to_save.empty(), fmt::format("{}", fmt::join(c.lora.modules_to_save, ",")));
      }));
  all.push_back(text({"adapter", "DIR", "none", "my-adapter",
                      "go on from this adapter: a folder that PEFT has written, or a run or checkpoint with adapters"},
                     &C::adapter));
  all.push_back(
      choice<WeightCode>({"base", "FORMAT", "as the model's files have them: bf16, or NF4 by bitsandbytes", "nf4",
                          "how frozen matrices of blocks are stored: bf16, int8, nf4, nf4-double or fp8"},
                         &C::base, {base_formats.begin(), base_formats.end()}));
}

}  // namespace fields

std::string_view base_name(WeightCode code) noexcept {
  const auto found = std::ranges::find(fields::base_formats, code, &std::pair<std::string_view, WeightCode>::second);
  return found == fields::base_formats.end() ? "unknown" : found->first;
}

}  // namespace tandem
