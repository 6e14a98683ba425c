#pragma once
// RoPE in a Hugging Face config.json.
#include <nlohmann/json_fwd.hpp>

#include "models/config/config.hpp"
#include "models/hf/hf_architectures.hpp"
#include "models/hf/hf_fields.hpp"

namespace tandem {

/// Reads what `c`, of class `a`, has of RoPE, as transformers 4 spells it (rope_theta beside rope_scaling) or 5
/// (rope_parameters). Its positions are known. Throws UsageError that names a field.
void read_rope(const Fields& f, const HfArchitecture& a, ModelConfig& c);
/// The fields of config.json that read_rope() reads the same from; both spellings where the layers differ.
nlohmann::ordered_json rope_fields(const ModelConfig& c);

}  // namespace tandem
