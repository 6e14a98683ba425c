#pragma once
// What the caller of the offload engine wants.
#include <cstddef>
#include <cstdint>

#include "core/numerics/adam.hpp"
#include "scheduler/policy.hpp"

namespace tandem {

enum class OnNonfinite : std::uint8_t { skip, stop };

struct OffloadOptions {
  std::size_t device_memory = 0;           ///< hard ceiling in bytes; 0: the device's capacity
  std::size_t reserved_device_memory = 0;  ///< of it, the caller's own share (activations, workspaces)
  std::size_t host_memory = 0;             ///< ceiling in bytes of pinned and pageable memory; 0: no ceiling
  Policy policy;
  std::int64_t subgroup_size = 0;   ///< parameters, rounded up to layout_quantum; 0: chosen
  int resident_layers = -1;         ///< layers whose weights stay on the device; -1: as many as fit
  int prefetch_layers = 0;          ///< weight buffers of each size class, >= 1; 0: two where they fit
  int max_micro_batches = 1;        ///< per step; more than one needs an accumulator
  AdamW adamw;
  OnNonfinite on_nonfinite = OnNonfinite::skip;
  double watchdog_seconds = 300.0;  ///< a wait without any progress for this long ends with StalledError
};

}  // namespace tandem
