#pragma once
// Sources of adapters: a folder that PEFT has written, or a checkpoint of a run that trained some.
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/params/parameter_layout.hpp"
#include "io/checkpoint.hpp"
#include "io/safetensors.hpp"
#include "models/config/config.hpp"
#include "models/transformer/adapter_modules.hpp"
#include "train/hf/peft_config.hpp"

namespace tandem {

/// Tensors in PEFT's file of a matrix of an adapter, or of a parameter that is saved whole, each of an equal part of
/// it.
std::vector<PeftTensor> peft_tensors_of(const ModelConfig& config, const Parameter& parameter);

/// An adapter: matrices A and B of linear layers, and modules that were trained whole beside them.
class AdapterSource {
 public:
  /// A folder with adapter_config.json and adapter_model.safetensors. Throws UsageError where it holds none, or one
  /// that is not done here; InputError on a bad file.
  explicit AdapterSource(const std::filesystem::path& folder);
  /// A checkpoint whose manifest describes an adapter. Throws UsageError.
  explicit AdapterSource(std::unique_ptr<Checkpoint> checkpoint);

  const std::filesystem::path& folder() const noexcept { return folder_; }
  const PeftConfig& description() const noexcept { return description_; }
  /// The checkpoint that it lies in; null: a folder of PEFT's.
  const Checkpoint* checkpoint() const noexcept { return checkpoint_.get(); }
  /// Whether a parameter's values are the adapter's, not the base's.
  bool holds(const ModelConfig& config, const Parameter& parameter) const;
  /// Whether it has all adapters and saved modules of the layout, and nothing else, each of its shape. Throws
  /// InputError that names those which are missing, misshapen or unexpected. `config`: with these adapters.
  void check(const ModelConfig& config, const ParameterLayout& layout) const;
  /// Elements [first, first + values.size()) of a parameter that it holds.
  void read(const ModelConfig& config, const Parameter& parameter, std::int64_t first, std::span<float> values) const;

 private:
  void check_checkpoint(const ParameterLayout& layout) const;
  void check_tied(const ModelConfig& config, const Parameter& table) const;
  const StoredTensor* stored(const ModelConfig& config, const Parameter& parameter, const PeftTensor& tensor) const;
  void read_part(const StoredTensor& tensor, const PeftTensor& as, std::int64_t first, std::span<float> values) const;

  std::filesystem::path folder_;
  PeftConfig description_;
  std::unique_ptr<Checkpoint> checkpoint_;
  std::unique_ptr<SafetensorsReader> tensors_;
};

/// Whether the folder holds an adapter as PEFT writes it.
bool is_peft_folder(const std::filesystem::path& folder);

/// Throws UsageError where folders in this one are adapters, as PEFT writes several of one model. `typed`: flag before
/// the name.
void refuse_several_adapters(const std::filesystem::path& folder, std::string_view typed);

/// The adapter of a folder of PEFT's, of a checkpoint, or of a run's newest good checkpoint. `typed`: flag before the
/// name, for errors. Throws UsageError where it is none of these, or its training had no adapters.
std::shared_ptr<const AdapterSource> open_adapter(const std::filesystem::path& path, std::string_view typed);

}  // namespace tandem
