#pragma once
// Rules of memory for the ops of a device that need not be there: for plans of runs on other machines.
#include <memory>
#include <string_view>

#include "core/ops/ops.hpp"

namespace tandem {

/// Rules of the ops of a kind of device: "host", a host device of so many threads; "cuda", whatever the threads, a GPU
/// with cuBLASLt and cuDNN whose products leave GELU to kernels, also in builds without CUDA. Throws UsageError for
/// another kind.
std::unique_ptr<OpsRules> rules_of(std::string_view kind, int threads);

}  // namespace tandem
