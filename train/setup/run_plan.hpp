#pragma once
// Plan of a run: every byte and every choice, as a function of configuration, model and machine. No device is asked.
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/ops/ops.hpp"
#include "core/params/parameter_layout.hpp"
#include "models/transformer/transformer.hpp"
#include "offload/engine/state_io.hpp"
#include "scheduler/plan/plan.hpp"
#include "scheduler/search/auto.hpp"
#include "train/config/config.hpp"
#include "train/hf/trained_layout.hpp"
#include "train/saving/checkpoint_space.hpp"
#include "train/saving/save_prediction.hpp"

namespace tandem {

/// Purpose of a run; decides what is booked.
struct RunPurpose {
  bool training = true;
  bool saves = false;       ///< books buffers for state on its way to checkpoints, or a copy of all of it
  bool resumes = false;     ///< books buffers for state on its way from a checkpoint
  bool predicts = true;     ///< false: it is enough to know what fits
  std::int64_t cached = 0;  ///< RunShape::cached, of a run that decodes
};

/// The machine that is planned for, of several devices each: an open device, or a profile.
struct RunMachine {
  std::string device_kind;
  int device_threads = 1;         ///< threads of the host device's kernels
  int update_threads = 1;         ///< threads of the CPU update
  const OpsRules* ops = nullptr;  ///< rules of its operations; not owned, not null
  PlanningFacts facts;
  std::size_t program_bytes = 0;  ///< bytes of the process on the host before the run takes memory; all ranks together
  std::optional<MachineProfile> profile;  ///< rates, shared by all ranks; none: nothing is predicted
  LayerSeconds slower{1.0, 1.0};          ///< times that forward and backward take longer than the profile has it
  int processes = 1;                      ///< processes of the run; of several each has one rank
};

/// Host bytes of a process that holds no run yet: of the program itself, or what is assumed of it where it is not more.
/// An assumption, so that a plan of a run is the same whether the run is begun or only planned.
std::size_t program_bytes(std::string_view device_kind, std::size_t measured) noexcept;

/// Speed of the machine as known, and the choices that follow from it.
struct RunPrediction {
  MachineProfile profile;
  std::vector<LayerSeconds> compute;
  Choice choice;
};

/// When DPO's reference is computed.
struct ReferencePlan {
  bool in_step = false;                    ///< in each step; else before the first
  std::size_t bytes = 0;                   ///< bytes of log-probabilities, held by the first rank
  std::optional<double> before_seconds{};  ///< predicted, of the passes before the first step
  std::optional<double> added_seconds{};   ///< predicted, by which all steps together are longer otherwise
  std::string text{};                      ///< the choice and its reason, in words
};

/// Plan of a run. On several devices it is the plan of the first rank, whose slices are the largest, with those of the
/// others.
struct RunPlan {
  ModelConfig model_config;
  RunShape shape;
  ParameterLayout layout;
  OffloadOptions options;
  PlanningFacts facts;  ///< facts that it was planned by; available memory includes what the process held
  Plan plan;            ///< plan of the engine
  std::optional<RunPrediction> prediction;  ///< a training run's, where the machine's rates are known
  std::string order;  ///< order of a step's micro-batches and its reason, in words; empty for a single micro-batch
  std::optional<ReferencePlan> reference{};      ///< when DPO's reference is computed; empty without DPO
  MemoryPlan memory;                             ///< memory of the whole process: engine, model, program
  std::size_t activation_bytes = 0;              ///< bytes of the model on the device
  std::size_t page_tables = 0;                   ///< bytes that the driver takes on the device for all pinned memory
  std::size_t batch_slots = 1;                   ///< micro-batches whose tokens the host holds at once
  Saving saving;                                 ///< memory for it is booked
  std::optional<CheckpointSpace> checkpoints{};  ///< empty where nothing is saved
  /// Plans of the ranks from 1 on, without a prediction, saving or order of their own; of the first rank's plan alone.
  std::vector<RunPlan> other_ranks{};

  /// Format of the frozen matrices of blocks; none: as weights are.
  WeightCode base_format() const noexcept { return tandem::base_format(layout); }
  /// Parameters whose values its checkpoints hold: with adapters, or over frozen matrices in fewer bits, the trained
  /// ones alone.
  SavedState saved_state() const noexcept {
    return model_config.lora || base_format() != WeightCode::none ? SavedState::trained : SavedState::all;
  }
  int ranks() const noexcept { return options.rank.count; }
  /// Bytes of each device, and of all of the host.
  std::size_t planned_device_bytes() const noexcept { return memory.device_bytes(); }
  std::size_t planned_host_bytes() const { return all_memory().host_bytes(); }
  /// Memory of the first device, and of the host for all ranks.
  MemoryPlan all_memory() const;
  /// Whether training may go on with another plan where it does not go as predicted. State in a file stays there.
  bool may_replan() const noexcept {
    return options.rank.count == 1 && prediction && options.policy.kind == Policy::Kind::automatic &&
           plan.file_buffers == 0;
  }
  /// The memory table with which a run begins and which `plan` prints, for people: bytes of device and host, what
  /// stands behind them, the ceiling, and the predicted step where rates are known.
  std::string table() const;
};

/// Plans a run: the way of computing that is predicted fastest where rates are known, else the first that fits.
/// `config`: of all ranks, with its sequence length resolved. Without training all parameters are frozen. Throws
/// PlanError (with the table), UsageError.
RunPlan plan_run(const TrainConfig& config, const ModelConfig& model, const RunPurpose& purpose,
                 const RunMachine& machine);

/// Throws PlanError where no policy that plan_run() would try fits; simulates nothing.
void require_fit(const TrainConfig& config, const ModelConfig& model, const RunPurpose& purpose,
                 const RunMachine& machine);

}  // namespace tandem
