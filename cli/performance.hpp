#pragma once
// What the performance model needs of a model and a machine, for the commands that ask it.
#include <optional>
#include <string>
#include <vector>

#include "core/device.hpp"
#include "models/transformer.hpp"
#include "scheduler/auto.hpp"
#include "train/config.hpp"

namespace tandem {

/// Arithmetic of a micro-batch, layer by layer: matrix products, attention, and what is bound by memory.
std::vector<LayerWork> work_of(const ModelConfig& config, const RunShape& shape);

/// The profile named, else the cached one of this device; none where there is neither, or where the cached one
/// is of another CPU, device or version. A named profile of another machine is warned of where `executes`.
std::optional<MachineProfile> find_profile(const std::string& file, const Device& device, const TrainConfig& config,
                                           bool executes);

/// A run on a machine that need not be this one.
struct WhatIf {
  ModelConfig model;
  RunShape shape;
  ParameterLayout layout;
  OffloadOptions options;
  PlanningFacts facts;
  std::vector<LayerSeconds> compute;
  Choice choice;
};

/// Plans for the machine of the profile: its memory, unless the configuration has ceilings. Activations fall
/// back as in training. Throws PlanError.
WhatIf plan_for_machine(const TrainConfig& config, const ModelConfig& model, const MachineProfile& profile);

/// Whether any policy fits there; simulates nothing.
bool fits_machine(const TrainConfig& config, const ModelConfig& model, const MachineProfile& profile);

}  // namespace tandem
