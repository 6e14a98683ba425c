#pragma once
// Matrices in NF4 as bitsandbytes writes them: codes under the name of the weight, and beside them scales, the code
// book and a description in JSON.
#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/params/weight_encoder.hpp"
#include "io/safetensors.hpp"

namespace tandem {

/// A matrix in NF4, of tensors of mapped files, which must outlive it.
class Nf4Tensor {
 public:
  /// The tensor of a name, or null.
  using Find = std::function<const StoredTensor*(const std::string&)>;

  /// Whether tensors beside the one of this name say that it is quantized by bitsandbytes, and how does not matter.
  static bool is_quantized(const std::string& name, const Find& find);
  /// Reads the description of a tensor for which is_quantized(). Throws InputError, with `what` before it, where it is
  /// not NF4 in blocks of 64, and of scales in bytes 256, by the numbers of core/numerics/weight_codes.hpp, or where
  /// parts are missing or of another size than the description says.
  Nf4Tensor(const std::string& what, const std::string& name, const Find& find);

  const std::vector<std::int64_t>& shape() const noexcept { return shape_; }
  /// All the tensors that it consists of.
  const std::vector<const StoredTensor*>& parts() const noexcept { return parts_; }
  /// Whether scales are bytes, as in WeightCode::nf4_double.
  bool has_coded_scales() const noexcept { return nested_ != nullptr; }

  /// Values of elements [first, first + values.size()), not rounded.
  void read(std::int64_t first, std::span<float> values) const;
  /// Codes of elements [first, first + count), first even, to `sink` as those from `to` on.
  void give_codes(std::int64_t first, std::int64_t count, std::int64_t to, CodeSink& sink) const;
  /// Scales of the blocks of these elements, which begin with one, as floats from `to` on.
  void give_scales(std::int64_t first, std::int64_t count, std::int64_t to, CodeSink& sink) const;
  /// All scales as bytes, as nf4_double has them. Only where has_coded_scales().
  void give_coded_scales(CodeSink& sink) const;

 private:
  const StoredTensor& part(const std::string& what, const std::string& name, const Find& find);
  void read_description(const std::string& what, const StoredTensor& description);
  void check_sizes(const std::string& what) const;
  std::int64_t count() const;
  float absmax(std::int64_t block) const;

  std::vector<std::int64_t> shape_;
  const StoredTensor* codes_ = nullptr;
  const StoredTensor* absmax_ = nullptr;
  const StoredTensor* nested_ = nullptr;  ///< scales of the scales; null: these are floats
  float offset_ = 0.0F;
  std::vector<const StoredTensor*> parts_;
};

}  // namespace tandem
