#pragma once
// What the caller of the offload engine wants.
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <vector>

#include "core/device/group.hpp"
#include "core/numerics/adam_state.hpp"
#include "scheduler/plan/policy.hpp"

namespace tandem {

enum class OnNonfinite : std::uint8_t { skip, stop };

/// The three ways to update a subgroup: on the CPU, streamed through the device, or resident there.
enum class UpdatePath : std::uint8_t { cpu, streamed, resident };

struct OffloadOptions {
  std::size_t device_memory = 0;           ///< hard ceiling in bytes, of context and libraries (DeviceInfo::reserved)
                                           ///< too; 0: all that the device was opened with
  std::size_t reserved_device_memory = 0;  ///< of it, the caller's own share (activations, workspaces)
  std::size_t host_memory = 0;             ///< ceiling in bytes of pinned and pageable memory, of all ranks of a group,
                                           ///< which share a machine; 0: no ceiling
  std::size_t reserved_host_memory = 0;  ///< of it, the caller's own share (its program, buffers, activations): what of
                                         ///< that is taken already, PlanningFacts::host_available is to include
  std::size_t spare_device_memory = 0;   ///< bytes booked under the same ceiling beside what the plan uses, as room
                                         ///< for other plans that the engine is to adopt
  std::size_t spare_host_memory = 0;     ///< the same of host memory
  /// A folder on a disk that is fast, for the optimizer state that there is no room for in host memory: as little as
  /// will do. It lies in one file without a name, which goes with the engine. Empty: all of it is in memory.
  std::filesystem::path state_folder{};
  Policy policy;
  Rank rank;                       ///< of several devices that train one model together, each with a plan of its own
  std::vector<UpdatePath> paths;   ///< one for each subgroup, instead of the policy's division; empty: the policy's
  std::int64_t subgroup_size = 0;  ///< parameters, rounded up to layout_quantum; 0: chosen
  int resident_layers = -1;       ///< so many layers' weights stay on the device, the most worth it; -1: as many as fit
  int prefetch_layers = 0;        ///< weight buffers for layers of a size that follow each other; 0: two where they fit
  int max_micro_batches = 1;      ///< per step on this rank; more than one, of all ranks, need an accumulator
  int micro_batches_at_once = 1;  ///< so many the caller takes through each use of a layer. 1: forward and backward
                                  ///< of one, then of the next. All of a step: each layer is used twice a step
  /// All of a tied parameter's gradient comes with its owner's: a layer that borrows it is asked for none of it. Else
  /// its buffer is held from the one's backward to the other's, of each micro-batch at once.
  bool owners_make_gradients = false;
  /// Bytes of a layer's input for one micro-batch, where the caller sends it to the host in forward and fetches it
  /// again in backward, beside what the engine moves; 0: it stays on the device. For the performance model alone.
  std::size_t offloaded_input_bytes = 0;
  int update_threads = 0;  ///< at most so many for an update on the CPU: fewer leave more of DRAM to copies; 0: all
  StateFormat state = StateFormat::fp32;
  AdamW adamw;
  std::uint64_t seed = 0;  ///< of stochastic rounding, where the format has any
  OnNonfinite on_nonfinite = OnNonfinite::skip;
  /// Whether steps clip the gradient norm (StepOptions::max_grad_norm > 0). Where they do not, and stop at a gradient that
  /// is not finite, updates run in backward. For the performance model alone.
  bool clips = true;
  bool overlap = true;              ///< false: one thing after another, to measure what overlap is worth
  double watchdog_seconds = 300.0;  ///< a wait without any progress for this long ends with StalledError
};

}  // namespace tandem
