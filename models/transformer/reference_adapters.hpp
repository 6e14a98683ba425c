#pragma once
// Adapters of DPO's reference, where training goes on from some: copies that stay as those were.
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/memory/carver.hpp"
#include "models/config/config.hpp"

namespace tandem {

/// Matrices A and B of all blocks in device memory of the model's own, bf16 as weights are, for forwards of the
/// reference in steps.
class ReferenceAdapters {
 public:
  struct Matrix {
    std::string name;       ///< within its block, as the layout has it
    std::string full_name;  ///< name of the parameter whose first values it holds
    TensorView values;
  };

  /// Takes the memory of the adapters of a config that has some. Their values are the caller's to write.
  ReferenceAdapters(const ModelConfig& config, Carver& carver);

  /// Matrices by block.
  const std::vector<std::vector<Matrix>>& blocks() const noexcept { return blocks_; }
  /// A block's matrix of that name, which it must have.
  TensorView matrix(std::int64_t block, std::string_view name) const;

 private:
  std::vector<std::vector<Matrix>> blocks_;
};

}  // namespace tandem
