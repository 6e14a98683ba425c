#pragma once
// Weights in Hugging Face directories: one model.safetensors, else shards with an index.
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/params/parameter_layout.hpp"
#include "core/params/weight_encoder.hpp"
#include "io/safetensors.hpp"
#include "models/config/config.hpp"
#include "train/hf/bitsandbytes.hpp"

namespace tandem {

struct HfTensor;

/// Mapped; only reading is done here.
class HfWeights {
 public:
  /// Opens `files` of a folder. Throws InputError on missing and corrupt ones, and where two hold one tensor, but not
  /// alike.
  HfWeights(std::filesystem::path directory, const std::vector<std::filesystem::path>& files);

  /// Throws InputError that names tensors missing, unexpected or misshapen, and where a tied head differs from the
  /// embedding, for which both are read. Matrices in NF4 by bitsandbytes may be those of parameters that are stored in
  /// NF4 too, or else are frozen; scales in bytes may become floats, and floats no bytes.
  void check(const ModelConfig& config, const ParameterLayout& layout) const;
  /// Widens elements [first, first + values.size()) of one parameter, transposing where it is stored so, and out of
  /// several tensors where it is of experts. Takes memory for a row at most.
  void read(const ModelConfig& config, const Parameter& parameter, std::int64_t first, std::span<float> values) const;
  /// Hands out codes and scales of a parameter whose tensors are in NF4 already, as they are: nothing is rounded again.
  /// False, and nothing is handed out, where they are not, and it is to be encoded of its values. After check().
  bool read_codes(const ModelConfig& config, const Parameter& parameter, CodeSink& sink) const;

 private:
  const StoredTensor* find(const std::string& name) const;
  const StoredTensor* stored(const ModelConfig& config, const std::string& name) const;
  void add(const SafetensorsReader& file, const std::string& name, const StoredTensor& tensor);
  void read_tensor(const ModelConfig& config, const HfTensor& tensor, const Parameter& parameter, std::int64_t first,
                   std::span<float> values) const;
  std::optional<Nf4Tensor> nf4_tensor(const std::string& name) const;
  void check_nf4(const Parameter& parameter, const HfTensor& tensor, const Nf4Tensor& stored, std::int64_t count) const;
  void check_types() const;
  void check_tied_head(const ModelConfig& config, const ParameterLayout& layout) const;
  std::filesystem::path directory_;
  std::vector<SafetensorsReader> files_;
  struct Placed {
    const StoredTensor* tensor;
    const SafetensorsReader* file;
  };
  std::map<std::string, Placed> tensors_;
};

/// Files that the tensors of a folder lie in: found once, and opened once, where they are first asked for.
class HfWeightFiles {
 public:
  /// Throws InputError on an index that is none.
  explicit HfWeightFiles(std::filesystem::path directory);

  /// Empty where the folder has no tensors. Some may be missing.
  const std::vector<std::filesystem::path>& files() const noexcept { return files_; }
  /// Tensors of the files. The first call opens and checks the files, which may take long where there are many; they
  /// are not opened again until close(), so that what was checked is what is read: a file that another takes the place
  /// of stays as it was. Thread-safe. Throws as HfWeights.
  std::shared_ptr<const HfWeights> weights();
  /// Lets go of the files: they close when nobody holds their tensors.
  void close();

 private:
  std::filesystem::path directory_;
  std::vector<std::filesystem::path> files_;
  std::mutex opening_;
  std::shared_ptr<const HfWeights> opened_;  ///< null: not open
};

/// The shape of the tensor in such a file that a parameter is, or is part of, or that is part of the parameter.
std::vector<std::int64_t> stored_shape(const Parameter& parameter, const HfTensor& tensor);

}  // namespace tandem
