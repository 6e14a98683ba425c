#include "train/config/lora_targets.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "core/base/error.hpp"
#include "train/config/name_pattern.hpp"

namespace tandem {
namespace {

bool is_name_character(char c) noexcept {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '.';
}

bool is_blank(char c) noexcept { return c == ' ' || c == '\t'; }

std::string_view without_blanks_around(std::string_view text) noexcept {
  while (!text.empty() && is_blank(text.front())) text.remove_prefix(1);
  while (!text.empty() && is_blank(text.back())) text.remove_suffix(1);
  return text;
}

bool is_list(std::string_view text) {
  return std::ranges::all_of(text, [](char c) { return is_name_character(c) || c == ',' || is_blank(c); });
}

}  // namespace

std::vector<std::string> names_in_list(std::string_view text) {
  std::vector<std::string> names;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    const std::string_view name = without_blanks_around(text.substr(begin, end - begin));
    const bool several = std::ranges::any_of(name, is_blank);
    if (name.empty() || several) {
      throw UsageError(fmt::format("'{}'", text), several ? "names have commas between them" : "a name is missing",
                       "for example q_proj,v_proj");
    }
    names.emplace_back(name);
    begin = end + 1;
  }
  return names;
}

bool names_module(std::string_view module, std::string_view name) noexcept {
  if (!module.ends_with(name)) return false;
  module.remove_suffix(name.size());
  return module.empty() || module.ends_with('.');
}

bool LoraTargets::matches(const std::string& module) const {
  if (all || none) return all;
  if (names.empty()) return std::regex_match(module, pattern);
  return std::ranges::any_of(names, [&](const std::string& name) { return names_module(module, name); });
}

LoraTargets parse_lora_targets(std::string_view text) {
  text = without_blanks_around(text);
  if (text.empty() || text == "all-linear") return {.all = true, .names = {}, .pattern = {}};
  if (text == "none") return {.none = true, .names = {}, .pattern = {}};
  LoraTargets targets;
  if (is_list(text)) {
    targets.names = names_in_list(text);
  } else {
    targets.pattern = name_pattern(text);
  }
  return targets;
}

LoraTargets parse_lora_experts(std::string_view text) {
  text = without_blanks_around(text);
  if (text.empty() || text == "none") return {.none = true, .names = {}, .pattern = {}};
  if (text == "all") return {.all = true, .names = {}, .pattern = {}};
  if (is_list(text)) return {.names = names_in_list(text), .pattern = {}};
  throw UsageError(fmt::format("'{}'", text), "not names with commas between them", "for example all, or down_proj");
}

}  // namespace tandem
