#pragma once
// tandem's public interface: include this.
#include "api/open_device.hpp"
#include "comm/local_group.hpp"
#include "core/device.hpp"
#include "core/error.hpp"
#include "core/group.hpp"
#include "core/memory.hpp"
#include "core/ops.hpp"
#include "core/parameter_access.hpp"
#include "core/parameter_layout.hpp"
#include "core/stall.hpp"
#include "core/tensor.hpp"
#include "core/version.hpp"
#include "offload/engine.hpp"
#include "scheduler/options.hpp"
#include "scheduler/plan.hpp"
#include "scheduler/policy.hpp"

namespace tandem {
using namespace literals;  // NOLINT: 2_GiB is part of the interface
}  // namespace tandem
