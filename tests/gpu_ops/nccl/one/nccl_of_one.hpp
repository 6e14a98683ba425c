#pragma once
// NCCL for a rank that is alone.
#include "comm/nccl/nccl_library.hpp"

namespace tandem::testing {

/// The fake, or the machine's own: the program is linked with a file that says which. Throws DeviceError where there is
/// none.
const nccl::Library& find_nccl();

}  // namespace tandem::testing
