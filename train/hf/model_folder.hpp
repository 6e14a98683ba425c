#pragma once
// Weights of a model folder in formats that are not read.
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

namespace tandem {

/// Weights, or what is left of them, in a format that is not read.
struct ForeignWeights {
  std::string file;         ///< its name in the folder, with a folder in between where that is what gives it away
  std::string_view format;  ///< such as "PyTorch"
  std::string advice;       ///< how to convert it, one line
};

/// Format of a file by its name; empty where it is none that is known.
std::optional<ForeignWeights> foreign_weights_of_name(const std::filesystem::path& file);
/// The one in a folder that says most: weights before the state of a trainer. Empty where there is none.
std::optional<ForeignWeights> foreign_weights_in(const std::filesystem::path& folder);

}  // namespace tandem
