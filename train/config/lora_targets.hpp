#pragma once
// Linear layers that have adapters, as --lora-targets and PEFT's target_modules name them.
#include <regex>
#include <string>
#include <string_view>
#include <vector>

namespace tandem {

/// All linear layers of blocks; or none; or those whose whole name ("model.layers.0.self_attn.q_proj") is one of
/// `names` or ends with a dot and one of them; or those whose whole name matches `pattern`.
struct LoraTargets {
  bool all = false, none = false;
  std::vector<std::string> names;
  std::regex pattern;  ///< used where there are no names
  /// Whether it targets the linear layer with this whole name.
  bool matches(const std::string& module) const;
};

/// "all-linear" or nothing; "none"; names with commas between them; any other text is a regular expression, as
/// name_pattern() takes it. Throws UsageError.
LoraTargets parse_lora_targets(std::string_view text);

/// Matrices of experts that have adapters, as --lora-experts and PEFT's target_parameters name them: "all" or names
/// with commas between them; nothing is none. Throws UsageError.
LoraTargets parse_lora_experts(std::string_view text);

/// Names with commas between them, and blanks around these or none. Throws UsageError where one is missing.
std::vector<std::string> names_in_list(std::string_view text);

/// Whether a name is `name` or ends with a dot and `name`.
bool names_module(std::string_view module, std::string_view name) noexcept;

}  // namespace tandem
