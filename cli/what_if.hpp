#pragma once
// Plans for machines that need not be this one.
#include <vector>

#include "core/device/device.hpp"
#include "models/transformer/transformer.hpp"
#include "scheduler/search/auto.hpp"
#include "train/config/config.hpp"

namespace tandem {

/// A run on a machine that need not be this one.
struct WhatIf {
  ModelConfig model;
  RunShape shape;
  ParameterLayout layout;
  OffloadOptions options;
  PlanningFacts facts;
  std::vector<LayerSeconds> compute;
  Choice choice;
  std::string order;  ///< of a step's micro-batches and why, in words; empty where it has one
};

/// Plans for the machine of the profile: its memory, less what its system is assumed to keep, unless the configuration
/// has ceilings. As training on a calibrated machine does, it keeps activations and orders micro-batches in the way
/// that is predicted fastest of those that fit. Throws PlanError.
WhatIf plan_for_machine(const TrainConfig& config, const ModelConfig& model, const MachineProfile& profile);

/// Throws PlanError where no policy fits there; simulates nothing.
void require_fit(const TrainConfig& config, const ModelConfig& model, const MachineProfile& profile);

}  // namespace tandem
