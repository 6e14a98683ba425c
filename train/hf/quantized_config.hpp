#pragma once
// Quantization of weights as config.json describes it: which is read, and which is refused.
#include <filesystem>

#include "core/numerics/weight_code.hpp"
#include "models/hf/hf_config.hpp"

namespace tandem {

/// A description, and the code that its linear layers are stored in.
struct StoredDescription {
  HfDescription description;
  WeightCode code = WeightCode::none;
};

/// Reads a config.json as read_hf_config() does, but takes NF4 by bitsandbytes too. Other quantizations are refused by
/// name: throws UsageError.
StoredDescription read_description(const std::filesystem::path& config_json);

}  // namespace tandem
