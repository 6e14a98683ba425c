#pragma once
// The CPU update with something around it: the pace of a slower machine, a fault to inject.
#include <cstdint>
#include <functional>
#include <memory>

#include "core/ops/update_kernels.hpp"

namespace tandem {

/// Must call `work`, which updates `count` parameters, or throw.
using AroundUpdate = std::function<void(std::int64_t count, const std::function<void()>& work)>;

/// `inner`, whose updates, also those that may be taken back, are done by `around`.
std::unique_ptr<UpdateKernels> make_wrapped_kernels(std::unique_ptr<UpdateKernels> inner, AroundUpdate around);

}  // namespace tandem
