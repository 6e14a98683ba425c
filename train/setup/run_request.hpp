#pragma once
// Requests of the configuration, before it is known where the run goes.
#include <cstdint>
#include <filesystem>
#include <string_view>

#include "api/open_device.hpp"
#include "models/transformer/transformer.hpp"
#include "scheduler/machine/profile.hpp"
#include "scheduler/plan/options.hpp"
#include "train/config/config.hpp"

namespace tandem {

/// Ranks of a run in so many processes, or in one, with a rank for each device. Throws UsageError where one of several
/// processes is to have several devices.
int ranks_of(const TrainConfig& config, int processes);
/// The configuration of one rank of the run: with its part of a step's micro-batches. Throws UsageError where they have
/// no equal parts, and as ranks_of.
TrainConfig config_of_rank(TrainConfig config, int processes = 1);
DeviceOptions device_options(const TrainConfig& config);
/// Options of the engine by the configuration. Nothing is reserved yet of the ceilings, which are the whole process's.
OffloadOptions offload_options(const TrainConfig& config);
/// Type of activations on a device of this kind. Throws UsageError where the configuration asks for one that the device
/// does not have.
DType compute_type(const TrainConfig& config, std::string_view device_kind);
/// Folder of --state-dir; empty where it was not given. Throws UsageError where it is no folder.
std::filesystem::path state_folder(const TrainConfig& config);
/// Throws UsageError where state may go to a file, and the profile by which that is to be predicted does not say how
/// fast one is.
void require_file_rates(const TrainConfig& config, const MachineProfile& profile);

/// Recomputation that the configuration asks for; where it leaves that open, the least that it allows. Throws
/// UsageError where the model has fewer blocks, or where inputs would be offloaded without recomputing all of them.
Recompute recompute_of(const TrainConfig& config, const ModelConfig& model);
/// The shapes of a run as the configuration begins with them. Throws UsageError.
RunShape run_shape(const TrainConfig& config, const ModelConfig& model, DType compute, bool training);
/// Sets the fields of the engine's options that depend on the shape.
void set_shape(OffloadOptions& options, const ModelConfig& model, const RunShape& shape);
/// Layout of the parameters that a run of this shape trains, with gradients of the types that its micro-batches ask
/// for. Throws as trained_layout.
ParameterLayout training_layout(const TrainConfig& config, const ModelConfig& model, const RunShape& shape);
/// The sequence length of a run: as given, else the model's positions but at most 1024. Throws UsageError
/// where it is beyond the positions.
std::int64_t sequence_length(const TrainConfig& config, const ModelConfig& model);

}  // namespace tandem
