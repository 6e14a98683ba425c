// NCCL as programs find it.
#include "comm/nccl/nccl_library.hpp"
#include "tests/gpu_ops/nccl/one/nccl_of_one.hpp"

namespace tandem::testing {

const nccl::Library& find_nccl() { return nccl::load(); }

}  // namespace tandem::testing
