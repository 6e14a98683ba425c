#pragma once
// Moves state and weights from where one plan has them to where another wants them, within the same blocks.
#include <cstddef>

#include "core/device/device.hpp"
#include "core/params/parameter_layout.hpp"
#include "scheduler/plan/plan.hpp"

namespace tandem {

struct Carving;

/// A plan and where everything of it lies. Not owned.
struct CarvedPlan {
  const Plan& plan;
  const Carving& carving;
};

/// Addresses of an engine's two blocks. Not owned.
struct BlockAddresses {
  std::byte* device = nullptr;
  std::byte* host = nullptr;
};

/// Bits stay as they are. Both plans are of `layout` and of one state format. While nobody uses the blocks. Takes 4 MiB
/// of host memory. Blocks. Throws DeviceError, after which the contents are lost. A copy that takes longer than
/// `watchdog_seconds` is told as a stall, and waited for.
void relocate(Device& device, const ParameterLayout& layout, const BlockAddresses& blocks, const CarvedPlan& from,
              const CarvedPlan& to, double watchdog_seconds);

}  // namespace tandem
