#pragma once
// The fake machine that the toy trainer's next device is on.
#include "tests/gpu_ops/fake_runtime/fake_cuda.hpp"

namespace tandem::testing {

fake_cuda::Machine& toy_machine();

}  // namespace tandem::testing
