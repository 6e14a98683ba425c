#pragma once
// Reference values from PyTorch, as make_fixtures.py writes them (safetensors files).
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "models/config/config.hpp"

namespace tandem::testing {

struct FixtureTensor {
  std::string dtype;  ///< "BF16", "F32", "F64", "I32"
  std::vector<std::int64_t> shape;
  std::vector<std::byte> data;

  template <class T>
  std::vector<T> as() const {
    std::vector<T> values(data.size() / sizeof(T));
    std::copy(data.begin(), data.end(), reinterpret_cast<std::byte*>(values.data()));
    return values;
  }
  /// BF16 or F32 widened to fp32; (I, O) turned to (O, I) where `transposed`.
  std::vector<float> floats(bool transposed = false) const;
};

struct FixtureOptimizer {
  double lr = 0, beta1 = 0, beta2 = 0, eps = 0, weight_decay = 0, clip = 0;
};

class Fixture {
 public:
  /// Throws std::runtime_error where the file cannot be read.
  explicit Fixture(const std::string& name);

  const FixtureTensor& operator[](const std::string& tensor) const { return tensors_.at(tensor); }
  bool has(const std::string& tensor) const { return tensors_.contains(tensor); }
  std::size_t gradient_count() const;
  /// Read from the file's config.json by the parser under test.
  const ModelConfig& config() const { return config_; }
  /// An entry of the file's metadata. Throws std::out_of_range.
  const std::string& metadata(const std::string& key) const { return metadata_.at(key); }
  float gradient_scale() const { return gradient_scale_; }
  /// The beta of DPO of a fixture of preferences, else 0.
  float beta() const { return beta_; }
  const FixtureOptimizer& optimizer() const { return optimizer_; }

 private:
  std::map<std::string, FixtureTensor> tensors_;
  std::map<std::string, std::string> metadata_;
  ModelConfig config_;
  float gradient_scale_ = 1.0F;
  float beta_ = 0.0F;
  FixtureOptimizer optimizer_;
};

/// Names of the folders in `fixtures`.
std::vector<std::string> fixture_names();
/// Names of all fixtures but GPT-2's.
std::vector<std::string> llama_fixture_names();
/// Fixtures of preferences, with two pairs.
std::vector<std::string> preference_fixture_names();
/// Names of the fixtures with experts.
std::vector<std::string> expert_fixture_names();

/// A folder of this test alone, removed with the object.
class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const std::filesystem::path& path() const { return path_; }
  /// Writes a file and returns where.
  std::filesystem::path write(const std::string& name, const std::string& text) const;

 private:
  std::filesystem::path path_;
};

}  // namespace tandem::testing
