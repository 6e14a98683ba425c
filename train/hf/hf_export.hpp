#pragma once
// A model as transformers loads it: config.json, safetensors in shards, generation config, tokenizer files.
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <vector>

#include "core/params/parameter_layout.hpp"
#include "io/checkpoint.hpp"
#include "models/config/config.hpp"

namespace tandem {

enum class ExportType : std::uint8_t { bf16, fp32 };

struct ExportContent {
  const ModelConfig& config;
  const ParameterLayout& layout;
  bool bytes = false;  ///< its tokens are bytes of text: written into config.json as tandem_token_kind
  ExportType type = ExportType::bf16;
  std::uint64_t shard_bytes = std::uint64_t{5} << 30;  ///< bytes of tensors in a file; more where one tensor is larger
  std::vector<FileBeside> beside;                      ///< copied: tokenizer files, generation_config.json
  /// Gives each parameter's master.
  std::function<void(const Parameter&, std::int64_t first, std::span<float>)> values;
};

/// Writes the folder `to` (new, or empty) through a hidden one beside it: it appears whole or not at all. Takes
/// memory for the largest parameter. Blocks. Throws WriteError.
void export_hf(const std::filesystem::path& to, const ExportContent& content);

}  // namespace tandem
