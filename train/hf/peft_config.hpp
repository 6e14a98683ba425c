#pragma once
// adapter_config.json, by which PEFT describes an adapter.
#include <string>
#include <string_view>
#include <vector>

#include "models/config/config.hpp"
#include "train/config/config.hpp"

namespace tandem {

struct PeftConfig {
  LoraOptions options;
  std::string base;           ///< model that the adapter belongs to: a path, or a name of the hub; empty: not said
  bool tied_modules = false;  ///< a saved embedding is the head's too
};

/// Reads a description. `where`: its file, for errors. Layers and modules that it leaves out become part of the text of
/// the targets. Throws UsageError that names what is not computed here: DoRA, other methods than LoRA, biases, and
/// whatever else changes what the adapter does.
PeftConfig parse_peft_config(std::string_view text, const std::string& where);

/// The text that parse_peft_config reads back, and PEFT loads: with the names of the layers that `config.lora` adapts.
std::string peft_config_text(const ModelConfig& config, const LoraOptions& options, const std::string& base);

}  // namespace tandem
