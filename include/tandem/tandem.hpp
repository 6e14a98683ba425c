#pragma once
// tandem's public interface: include this.
#include "api/open_device.hpp"
#include "comm/local_group.hpp"
#include "core/base/error.hpp"
#include "core/base/stall.hpp"
#include "core/base/version.hpp"
#include "core/device/device.hpp"
#include "core/device/group.hpp"
#include "core/host/large_copy.hpp"
#include "core/memory/memory.hpp"
#include "core/ops/ops.hpp"
#include "core/params/parameter_access.hpp"
#include "core/params/parameter_layout.hpp"
#include "core/tensor/tensor.hpp"
#include "offload/engine/engine.hpp"
#include "scheduler/plan/options.hpp"
#include "scheduler/plan/plan.hpp"
#include "scheduler/plan/policy.hpp"

namespace tandem {
using namespace literals;  // NOLINT: 2_GiB is part of the interface
}  // namespace tandem
