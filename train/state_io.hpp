#pragma once
// The engine's state to and from checkpoints, one parameter at a time.
#include <filesystem>

#include "io/checkpoint.hpp"
#include "offload/engine.hpp"

namespace tandem {

/// The parameters of a layout as a checkpoint lists them.
std::vector<CheckpointParameter> checkpoint_parameters(const ParameterLayout& layout);

/// Writes a checkpoint below `root`; parameters, adam_step and digest of the manifest are filled in here.
/// Takes memory for the largest parameter. Blocks. Throws WriteError.
std::filesystem::path save_state(OffloadEngine& engine, const std::filesystem::path& root, Manifest& manifest);

/// Throws InputError where the checkpoint belongs to another model or another --freeze.
void check_belongs(const Checkpoint& checkpoint, const ParameterLayout& layout);

/// Restores every parameter and the step count. Blocks.
void load_state(OffloadEngine& engine, const Checkpoint& checkpoint);

}  // namespace tandem
