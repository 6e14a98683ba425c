#pragma once
// A run with its devices open, planned and booked, before any memory of it is taken.
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "core/device/device.hpp"
#include "core/host/topology.hpp"
#include "models/transformer/transformer.hpp"
#include "scheduler/machine/profile.hpp"
#include "train/config/config.hpp"
#include "train/setup/processes.hpp"
#include "train/setup/run_plan.hpp"
#include "train/setup/run_request.hpp"

namespace tandem {

/// A plan and the device of this process' first rank, with those of its others. `model` is not bound to memory yet.
struct RunSetup : RunPlan {
  std::unique_ptr<Device> device;
  std::unique_ptr<Transformer> model;
  std::vector<std::string> doubts;          ///< about this machine's calibration, where that is what it was planned by
  std::vector<RunSetup> peers{};            ///< ranks of this process after its first, one by one
  Processes* processes = nullptr;           ///< the processes of the run; null: this one alone
  std::vector<std::string> names_of_all{};  ///< names of the devices of several processes, by rank

  /// "cuda:0 NVIDIA H200", of several one after another.
  std::string device_names() const;
  /// Peak bytes of each device so far. The memory of context and libraries was measured when the device was opened;
  /// page tables are counted as planned.
  std::size_t peak_device_bytes() const;
  /// Everything that may change a bit and is not the user's input.
  std::string compute_key() const;
  /// Part of it that says how a forward pass computes: "compute bf16, products e4m3, gradients e4m3; base nf4".
  std::string computing() const;
};

/// Facts about the machine that the caller knows, in place of those that would be found.
struct KnownMachine {
  const MachineProfile* profile = nullptr;  ///< rates; null: the calibration of this machine, where there is one
  const Topology* host = nullptr;           ///< machine whose memory the host has; null: this one
  LayerSeconds slower{1.0, 1.0};            ///< times that forward and backward take longer than the profile has it
  Processes* processes = nullptr;           ///< the processes of the run; null: this one alone
};

/// Opens the devices and plans the run on them, see plan_run(). Where there are several processes, each opens one, all
/// make the plan of one machine, and each takes its rank's part of it. Throws what that throws, and DeviceError.
RunSetup set_up_run(const TrainConfig& config, const ModelConfig& model, const RunPurpose& purpose,
                    const KnownMachine& known = {});

}  // namespace tandem
