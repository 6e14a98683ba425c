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

struct LoraOptions;

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

/// An adapter to write.
struct AdapterExport {
  const ModelConfig& config;      ///< with adapters
  const ParameterLayout& layout;  ///< layout whose trained parameters are the adapter
  const LoraOptions& options;
  std::string base;  ///< path or name of the model that it belongs to
  ExportType type = ExportType::bf16;
  std::vector<FileBeside> beside;  ///< copied: tokenizer files
  /// Gives each trained parameter's master.
  std::function<void(const Parameter&, std::int64_t first, std::span<float>)> values;
};

/// Writes an adapter as PEFT does, adapter_config.json and adapter_model.safetensors, like export_hf.
void export_adapter(const std::filesystem::path& to, const AdapterExport& content);

/// Values of a model whose adapters are added to its weights, W + scale B A, in fp32. `values`: those of the layout
/// with adapters, which must outlive the result, as must `layout`. Takes memory for the two matrices of one layer.
std::function<void(const Parameter&, std::int64_t first, std::span<float>)> merged_values(
    const ModelConfig& config, const ParameterLayout& layout,
    std::function<void(const Parameter&, std::int64_t first, std::span<float>)> values);

}  // namespace tandem
