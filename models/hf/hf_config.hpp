#pragma once
// Hugging Face config.json, read and written.
#include <filesystem>
#include <string>
#include <string_view>

#include "models/config/config.hpp"

namespace tandem {

/// Contents of a Hugging Face config.json.
struct HfDescription {
  ModelConfig config;
  std::string token_kind;  ///< "tandem_token_kind": "bytes" where tokens are bytes of text; empty where it says nothing
  std::string quantization;  ///< JSON of "quantization_config", for the reader of the weights; empty: there is none
};

/// Reads a Hugging Face config.json as transformers 4 and 5 write it. What tandem does not compute (an
/// unknown architecture or activation, another type of RoPE) is refused by name. Throws UsageError.
HfDescription read_hf_config(const std::filesystem::path& config_json);
/// Reads the text of a config.json; `name` becomes the model's name and stands in messages.
ModelConfig parse_hf_config(std::string_view text, const std::string& name);
/// The config.json that transformers would read back as this model, pretty-printed.
std::string hf_config_text(const ModelConfig& config, std::string_view torch_dtype);

}  // namespace tandem
