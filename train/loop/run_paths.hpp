#pragma once
// Paths in the configuration that a run keeps.
#include "train/config/config.hpp"

namespace tandem {

/// The configuration with its paths made absolute, so that the run can be resumed from any folder. A model that is a
/// built-in shape or a name of the hub stays, and so does a path that would be no UTF-8.
TrainConfig with_absolute_paths(TrainConfig config);

}  // namespace tandem
