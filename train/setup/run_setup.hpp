#pragma once
// Everything a run needs, decided and booked, before any memory of it is taken.
#include <cstddef>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "api/open_device.hpp"
#include "core/device/device.hpp"
#include "core/host/topology.hpp"
#include "core/params/parameter_layout.hpp"
#include "models/transformer/transformer.hpp"
#include "scheduler/plan/plan.hpp"
#include "scheduler/search/auto.hpp"
#include "train/config/config.hpp"
#include "train/saving/save_prediction.hpp"

namespace tandem {

/// What is known of the machine's speed, and what follows from it.
struct RunPrediction {
  MachineProfile profile;
  std::vector<LayerSeconds> compute;
  Choice choice;
};

/// Of a run on several devices, that of the first, whose slices are the largest, with those of the others.
struct RunSetup {
  ModelConfig model_config;
  ParameterLayout layout;
  std::unique_ptr<Device> device;
  std::unique_ptr<Transformer> model;
  OffloadOptions options;
  PlanningFacts facts;                      ///< that it was planned by; what is available counts what the process held
  Plan plan;                                ///< of the engine
  std::optional<RunPrediction> prediction;  ///< of a training run, where the machine is calibrated
  std::vector<std::string> doubts;          ///< about this machine's calibration, where that is what it was planned by
  std::string order;                        ///< of a step's micro-batches and why, in words; empty where it has one
  MemoryPlan memory;                        ///< of the whole process: engine, model, program
  std::size_t activation_bytes = 0;         ///< of the model, on the device
  std::size_t page_tables = 0;              ///< the driver's, of all pinned memory, on the device
  std::size_t batch_slots = 1;              ///< micro-batches whose tokens the host holds at once
  Saving saving;                            ///< memory for it is booked
  std::vector<RunSetup> peers{};  ///< rank by rank from 1 on; without a prediction, saving or order of their own

  int ranks() const noexcept { return 1 + static_cast<int>(peers.size()); }
  /// "cuda:0 NVIDIA H200", of several one after another.
  std::string device_names() const;
  /// Of each device, and of all of the host.
  std::size_t planned_device_bytes() const noexcept { return memory.device_bytes(); }
  std::size_t planned_host_bytes() const;
  /// Of the first device, and of the host for all.
  MemoryPlan all_memory() const;
  /// At most so far, of each device. What context and libraries take was measured when the device was opened; page
  /// tables are counted as planned.
  std::size_t peak_device_bytes() const;
  /// Whether training may go on with another plan where it does not go as predicted. State in a file stays there.
  bool may_replan() const noexcept {
    return peers.empty() && prediction && options.policy.kind == Policy::Kind::automatic && plan.file_buffers == 0;
  }
  /// All that may change a bit and is not the user's input.
  std::string compute_key() const;
  /// The memory table with which a run begins and which `plan` prints, for people: bytes of device and host, what
  /// stands behind them, the ceiling, and the predicted step where speeds are known.
  std::string table() const;
};

/// What the run is for; decides what is booked.
struct RunPurpose {
  bool training = true;
  bool saves = false;    ///< buffers for state on its way to checkpoints, or a copy of all of it
  bool resumes = false;  ///< the same for its way from one
  bool predicts = true;  ///< false: where it is enough to know what fits
  /// What to plan and predict by; null: the calibration of this machine, where there is one. Without, `auto` is what
  /// has most on the device.
  const MachineProfile* profile = nullptr;
  /// Whose memory the host has; null: this machine's.
  const Topology* machine = nullptr;
  LayerSeconds slower{1.0, 1.0};  ///< times that forward and backward take longer than the profile has it
};

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
/// Opens the device, resolves recompute and makes the plan: the predicted fastest where speeds are known, else the
/// first that fits. `config.seq_len` must be resolved. Without training all parameters are frozen. Throws
/// PlanError (with the table), UsageError, DeviceError.
RunSetup set_up_run(const TrainConfig& config, const ModelConfig& model, RunPurpose purpose);

/// The sequence length of a run: as given, else the model's positions but at most 1024. Throws UsageError
/// where it is beyond the positions.
std::int64_t sequence_length(const TrainConfig& config, const ModelConfig& model);

}  // namespace tandem
