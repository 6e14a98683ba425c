#pragma once
// Linear layers of a model that have adapters, and modules that are trained whole beside them.
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/params/parameter_layout.hpp"
#include "models/config/config.hpp"
#include "train/config/config.hpp"

namespace tandem {

/// The model's own parameters alone: its layout without adapters.
ModelConfig without_adapters(ModelConfig config);

/// Adapters that the options describe, for the model. `typed`: flag or file that the targets stand in, for errors.
/// Throws UsageError that names a target which is no linear layer of a block, with the nearest ones; where no layer is
/// found, or some experts of a layer alone; where a rank is beyond a matrix; and where experts are to have dropout.
LoraConfig lora_config(const ModelConfig& config, const LoraOptions& options, std::string_view typed);

/// Whether a parameter belongs to a module whose whole name ends as one of `modules` does. A tied one also has the name
/// of the module that shares it.
bool is_saved_module(const ModelConfig& config, const Parameter& parameter, const std::vector<std::string>& modules);

/// Whether a parameter is a matrix of a block that may be stored in another format while it is frozen: any but routers,
/// whose choices would change, and adapters.
bool is_codable(const ModelConfig& config, const Parameter& parameter);

/// Names of the linear layers with adapters, for PEFT: the shortest that name these layers and no others.
std::vector<std::string> target_names(const ModelConfig& config, const LoraConfig& lora);

/// Names of the matrices of experts with adapters that are parameters of transformers' modules, likewise.
std::vector<std::string> target_parameters(const ModelConfig& config, const LoraConfig& lora);

/// Name of the module that a parameter belongs to, such as "model.layers.0.self_attn.q_proj".
std::string module_of(const ModelConfig& config, const Parameter& parameter);

}  // namespace tandem
