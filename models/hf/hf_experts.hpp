#pragma once
// Mixtures of experts in config.json.
#include <nlohmann/json_fwd.hpp>

#include "models/config/config.hpp"
#include "models/hf/hf_architectures.hpp"
#include "models/hf/hf_fields.hpp"

namespace tandem {

/// Reads what the class knows of experts, their inner width included. Throws UsageError that names a field which asks
/// for what is not computed: experts in some layers alone, another loss beside that of the targets, noise.
void read_experts(const Fields& f, const HfArchitecture& a, ModelConfig& c);
/// The fields of a config.json that say it.
nlohmann::ordered_json expert_fields(const HfArchitecture& a, const ModelConfig& c);

}  // namespace tandem
