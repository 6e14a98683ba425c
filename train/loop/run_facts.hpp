#pragma once
// Facts of a run in which all its processes have to agree.
#include <vector>

#include "comm/assembly.hpp"
#include "train/config/config.hpp"

namespace tandem {

class PreparedRun;

/// Version, and what the configuration says, key by key, before anything is opened: without paths and what only speaks,
/// which may differ.
std::vector<Fact> facts_of(const TrainConfig& config);
/// Model, weights or checkpoint that it starts from, data, compute_key, of a run that is planned. Weights are known by
/// the sizes of their files and some of their bytes.
std::vector<Fact> facts_of(const PreparedRun& run);

}  // namespace tandem
