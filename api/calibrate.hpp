#pragma once
// Measures a device, its link and its host into a machine profile.
#include <filesystem>
#include <functional>
#include <string_view>

#include "core/device/device.hpp"
#include "core/host/topology.hpp"
#include "scheduler/machine/profile.hpp"

namespace tandem {

struct CalibrationOptions {
  double seconds_per_figure = 0.4;  ///< time spent on each of about 40 figures
  /// Bytes that copies and updates are measured over, at least 256 MiB: those of the run that is to be predicted, but
  /// no more than the default. 0, the default: four times the last level of caches, the host's or the device's. A run
  /// finds next to nothing of so much state in the caches, and more would give the same figures in a longer time.
  std::size_t working_set = 0;
  std::function<void(std::string_view what)> progress{};  ///< told before each figure; may be empty, and may throw
  std::filesystem::path disk_folder{};   ///< folder on the disk to measure for checkpoints; empty: none
  std::filesystem::path state_folder{};  ///< folder on the disk to measure for optimizer state; empty: none
};

/// Bytes of the working set for each parameter that is updated: master, moments, gradient and weight.
constexpr std::size_t calibrated_bytes_of_parameter = 16;

/// Blocks for some 10 to 30 seconds at the default. Takes the working set on the device, and twice as much on the
/// host; gives all of it back, also where what is told of progress ends it by throwing; a workspace that was bound to
/// the device's ops before is to be bound again. Writes 192 MiB into the disk's folder, which it makes, in a file that
/// it removes, and for about a second into one of 128 MiB without a name in the state's folder. Nothing else should run
/// meanwhile: spreads tell, and `others_busy`. Throws DeviceError, WriteError, and what calibrated_bytes does.
MachineProfile calibrate(Device& device, const CalibrationOptions& options = {});

/// The working set that `calibrate` takes on a device with so much cache, of which `room` bytes are free: as
/// CalibrationOptions says, at most a quarter of that and an eighth of the host's available memory, in whole blocks of
/// an arena. Throws PlanError where the one has less than 32 MiB free or the other less than 64 MiB.
std::size_t calibrated_bytes(const Topology& machine, std::size_t device_cache, std::size_t room,
                             std::size_t working_set);

/// Name and version of this machine and device, without figures: what a cached profile is compared with.
MachineProfile identify(const Device& device);

}  // namespace tandem
