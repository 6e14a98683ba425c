#pragma once
// Whether a checkpoint and a model belong together.
#include "core/numerics/adam_state.hpp"
#include "core/params/parameter_layout.hpp"
#include "io/checkpoint.hpp"
#include "models/config/config.hpp"

namespace tandem {

/// Description of the model that a checkpoint is of. Throws InputError where it names none.
ModelConfig config_of(const Checkpoint& checkpoint);

/// Throws InputError that names the first difference between what the models of a checkpoint and of `config` compute of
/// their parameters.
void check_function(const Checkpoint& checkpoint, const ModelConfig& config);

/// Whether training of this model may go on from the checkpoint: it holds state of the optimizer of `state` for the
/// layout's parameters, frozen or trained alike, and its model computes the same of them, with as many heads for one,
/// which shapes do not tell. Throws InputError that names the first difference.
void check_resumable(const Checkpoint& checkpoint, const ModelConfig& config, const ParameterLayout& layout,
                     StateFormat state);

}  // namespace tandem
