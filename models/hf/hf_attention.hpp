#pragma once
// Attention fields of a Hugging Face config.json: which layers have a sliding window, and which know no positions.
#include <nlohmann/json_fwd.hpp>

#include "models/config/config.hpp"
#include "models/hf/hf_architectures.hpp"
#include "models/hf/hf_fields.hpp"

namespace tandem {

/// Reads `attention` and `window` of a model of class `a`. `c` has its positions, number of layers and `scales_all`.
/// Throws UsageError that names a field.
void read_attention(const Fields& f, const HfArchitecture& a, ModelConfig& c);
/// The fields of config.json that read_attention() reads the same from.
nlohmann::ordered_json attention_fields(const HfArchitecture& a, const ModelConfig& c);

}  // namespace tandem
