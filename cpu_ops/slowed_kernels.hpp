#pragma once
// The CPU update of a slower machine, for measurements: the same bits, later.
#include <memory>

#include "core/update_kernels.hpp"

namespace tandem {

/// `inner`, whose `adamw` sleeps after its work until it has taken as long as `parameters_per_second` allows.
std::unique_ptr<UpdateKernels> make_slowed_kernels(std::unique_ptr<UpdateKernels> inner, double parameters_per_second);

}  // namespace tandem
