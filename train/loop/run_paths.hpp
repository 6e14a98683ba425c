#pragma once
// Paths in the configuration that a run keeps.
#include <string>

#include "train/config/config.hpp"

namespace tandem {

/// A model that is a path, made absolute; a built-in shape or a name of the hub stays.
std::string absolute_path(std::string model);

/// The configuration with its paths made absolute, so that the run can be resumed from any folder. A model that is a
/// built-in shape or a name of the hub stays, and so does a path that would be no UTF-8.
TrainConfig with_absolute_paths(TrainConfig config);

}  // namespace tandem
