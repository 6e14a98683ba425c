#pragma once
// Writing frozen weights that are stored in another format.
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>

#include "core/device/device.hpp"
#include "core/params/parameter_layout.hpp"
#include "core/params/weight_encoder.hpp"
#include "offload/storage/storage.hpp"

namespace tandem {

/// Writes codes and scales to where the plan has them, and keeps a hash of each parameter's, by which the digest knows
/// them: a rank has no more than its own part of either. Blocks. While no task is in flight.
class CodedWeights {
 public:
  /// All references must outlive the object. A copy that takes longer than `watchdog_seconds` is told as a stall, and
  /// waited for.
  CodedWeights(Device& device, const ParameterLayout& layout, const Storage& storage, double watchdog_seconds);
  ~CodedWeights();

  /// A parameter's sink: what was written before is forgotten. Codes and scales that are not the rank's own count in
  /// the hash and go nowhere. It throws MisuseError on pieces out of order. Valid until the next call for the
  /// parameter.
  CodeSink& begin(const Parameter& parameter);
  /// XXH3-128 of a parameter's codes, and then that of its scales, hashed together. Throws MisuseError where not all
  /// has been written.
  std::array<unsigned char, 16> hash(const Parameter& parameter) const;

 private:
  class Writing;
  void write(LayerIndex layer, std::int64_t element, std::int64_t count, const std::byte* bytes) const;
  void copy_to_device(std::byte* to, const std::byte* from, std::size_t bytes) const;

  Device& device_;
  const ParameterLayout& layout_;
  const Storage& storage_;
  Stream stream_;
  double watchdog_seconds_;
  std::map<std::string, std::unique_ptr<Writing>, std::less<>> writing_;  ///< by full name
};

}  // namespace tandem
