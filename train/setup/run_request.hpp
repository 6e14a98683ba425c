#pragma once
// What the configuration asks of a run, before it is known where it runs.
#include <cstdint>
#include <filesystem>
#include <string_view>

#include "api/open_device.hpp"
#include "models/transformer/transformer.hpp"
#include "scheduler/machine/profile.hpp"
#include "scheduler/plan/options.hpp"
#include "train/config/config.hpp"

namespace tandem {

/// What one rank of the run is asked for: its part of a step's micro-batches. Throws UsageError where they have no
/// equal parts.
TrainConfig config_of_rank(TrainConfig config);
DeviceOptions device_options(const TrainConfig& config);
/// What the configuration asks of the engine; of the ceilings, which are the whole process's, nothing is reserved yet.
OffloadOptions offload_options(const TrainConfig& config);
/// Of activations on a device of this kind. Throws UsageError where the configuration asks for another than there is.
DType compute_type(const TrainConfig& config, std::string_view device_kind);
/// Of --state-dir; empty where it was not given. Throws UsageError where it is no folder.
std::filesystem::path state_folder(const TrainConfig& config);
/// Throws UsageError where state may go to a file, and the profile by which that is to be predicted does not say how
/// fast one is.
void require_file_rates(const TrainConfig& config, const MachineProfile& profile);

/// What is computed again where the configuration says it; where it leaves that open, the least that it allows.
/// `blocks` is the number of the model's. Throws UsageError where the model has not so many, or their inputs would be
/// offloaded without all of them.
Recompute recompute_of(const TrainConfig& config, const ModelConfig& model);
/// The shapes of a run as the configuration begins with them. Throws UsageError.
RunShape run_shape(const TrainConfig& config, const ModelConfig& model, DType compute, bool training);
/// What an engine must know of it.
void set_shape(OffloadOptions& options, const ModelConfig& model, const RunShape& shape);
/// What a run of this shape trains, with gradients of the types that its micro-batches ask for. Throws as
/// frozen_layout.
ParameterLayout training_layout(const TrainConfig& config, const ModelConfig& model, const RunShape& shape);
/// The sequence length of a run: as given, else the model's positions but at most 1024. Throws UsageError
/// where it is beyond the positions.
std::int64_t sequence_length(const TrainConfig& config, const ModelConfig& model);

}  // namespace tandem
