#pragma once
// Inputs of the performance model: the work of a model, and the profile of this machine.
#include <optional>
#include <string>
#include <vector>

#include "core/device/device.hpp"
#include "models/transformer/transformer.hpp"
#include "scheduler/machine/cost_model.hpp"
#include "scheduler/machine/profile.hpp"
#include "train/config/config.hpp"

namespace tandem {

/// Arithmetic of a micro-batch, layer by layer: matrix products, attention, and what is bound by memory. Attention is
/// counted where tokens see each other, in records as `sequences` has them. `layout`: the model's, which says what is
/// frozen, has adapters, or is stored in another format; null: all is trained.
std::vector<LayerWork> work_of(const ModelConfig& config, const RunShape& shape, const SequenceFacts& sequences = {},
                               const ParameterLayout* layout = nullptr);

/// Bytes of a layer's input for one micro-batch, where it waits on the host for backward; otherwise 0.
std::size_t offloaded_input_bytes(const ModelConfig& config, const RunShape& shape) noexcept;

/// The profile with link and CPU update as slow as the configuration emulates them.
MachineProfile as_emulated(MachineProfile profile, const TrainConfig& config);

/// The calibration of this machine with this device, as measured; none where there is none, or where it cannot be used:
/// it is of another CPU, device or version, or damaged, which is warned of. So are the doubts about one that is used.
std::optional<MachineProfile> find_calibration(const Device& device);

}  // namespace tandem
