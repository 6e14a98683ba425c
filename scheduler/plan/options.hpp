#pragma once
// Options of the offload engine, with their defaults.
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <vector>

#include "core/device/group.hpp"
#include "core/numerics/adam_state.hpp"
#include "scheduler/plan/policy.hpp"

namespace tandem {

enum class OnNonfinite : std::uint8_t { skip, stop };

/// Whether updates on the CPU run in backward, before the gradient norm is known, and are taken back where it clips or
/// the step is skipped. `automatic`: while most steps are neither.
enum class Speculate : std::uint8_t { off, automatic, on };

/// The three ways to update a subgroup: on the CPU, streamed through the device, or resident there.
enum class UpdatePath : std::uint8_t { cpu, streamed, resident };

struct OffloadOptions {
  /// Hard ceiling in bytes, which covers context and libraries (DeviceInfo::reserved) too. Default: all that the device
  /// was opened with.
  std::optional<std::size_t> device_memory;
  /// Bytes of device_memory for the caller's own use (activations, workspaces).
  std::size_t reserved_device_memory = 0;
  /// Ceiling in bytes of pinned and pageable memory, of all ranks of a group, which share a machine. Default: none.
  std::optional<std::size_t> host_memory;
  /// Bytes of host_memory for the caller's own use (its program, buffers, activations); PlanningFacts::host_available
  /// must include those in use already.
  std::size_t reserved_host_memory = 0;
  std::size_t spare_device_memory = 0;  ///< bytes booked under the same ceiling beside what the plan uses, as room
                                        ///< for other plans that the engine is to adopt
  std::size_t spare_host_memory = 0;    ///< bytes booked under host_memory in the same way
  /// Folder on a fast disk, for the optimizer state that does not fit in host memory: as little as will do. The state
  /// lies in one file without a name, which ends with the engine. Default: all state is in memory.
  std::optional<std::filesystem::path> state_folder;
  Policy policy;
  Rank rank;  ///< this rank, of several devices that train one model together, each with a plan of its own
  /// Update path of each subgroup. Default: the policy's division.
  std::optional<std::vector<UpdatePath>> paths;
  std::optional<std::int64_t> subgroup_size;  ///< parameters, rounded up to layout_quantum. Default: chosen
  /// Number of layers whose weights stay on the device, the most worth it. Default: as many as fit.
  std::optional<int> resident_layers;
  /// Weight buffers for layers of a size that follow each other. Default: two where they fit, else one.
  std::optional<int> prefetch_layers;
  int max_micro_batches = 1;      ///< per step on this rank; more than one, of all ranks, need an accumulator
  int micro_batches_at_once = 1;  ///< micro-batches that the caller takes through each use of a layer. 1: forward and
                                  ///< backward of one, then of the next. All of a step: each layer is used twice a step
  /// Whether the whole gradient of a tied parameter comes with its owner's, so that a layer that borrows it is asked
  /// for none. False: its buffer is held from the backward of one layer to that of the other, for each micro-batch that
  /// passes at once.
  bool owners_make_gradients = false;
  /// Bytes of a layer's input for one micro-batch, where the caller sends it to the host in forward and fetches it in
  /// backward, in addition to the engine's copies; 0: it stays on the device. Used by the performance model alone.
  std::size_t offloaded_input_bytes = 0;
  /// Largest number of threads of an update on the CPU: fewer leave more of DRAM to copies. Default: all.
  std::optional<int> update_threads;
  StateFormat state = StateFormat::fp32;
  AdamW adamw;
  std::uint64_t seed = 0;  ///< seed of stochastic rounding, where the format has any
  OnNonfinite on_nonfinite = OnNonfinite::skip;
  /// Whether steps clip the gradient norm (StepOptions::max_grad_norm > 0). Where they do not, and stop at a gradient
  /// that is not finite, updates run in backward. For the performance model alone.
  bool clips = true;
  /// Needs memory on the host for what takes updates back, a little above a byte for each parameter that the CPU
  /// updates: `on`, or the plan does not fit; `automatic` goes without where there is none. Never changes a bit. Steps
  /// that are open-ended or leave gradients out (StepOptions) do not speculate: a caller of these alone says `off`,
  /// which books none.
  Speculate speculate = Speculate::automatic;
  /// Whether fp8_factors (ParameterOptions) of layers that do not stay on the device cross the link in a byte an
  /// element, where there is memory for that and, with rates of the machine, it is predicted to be faster. With one
  /// rank. Never changes a bit.
  bool link_codes = true;
  bool overlap = true;  ///< false: one task after another, to measure what overlap is worth
  /// Setting for debugging: fills a weight buffer with NaN when its guard goes, so that a view which outlives the guard
  /// is seen. A layer is then copied anew for each use; those that stay on the device are left alone.
  bool poison_released = false;
  double watchdog_seconds = 300.0;  ///< a wait without any progress for this long ends with StalledError
};

}  // namespace tandem
