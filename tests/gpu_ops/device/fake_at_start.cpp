// For a program that knows nothing of the fake: installs a machine with one card before main, and fails at the end
// where the program did what CUDA leaves undefined.
#include <cstdlib>

#include "tests/gpu_ops/fake_runtime/fake_cuda.hpp"

namespace tandem::fake_cuda {
namespace {

void fail_where_undefined() {
  if (tell_complaints()) std::_Exit(undefined_use);
}

const bool installed = [] {
  install(Machine{.guarded = true, .longest_delay_us = 20});
  return std::atexit(fail_where_undefined) == 0;
}();

}  // namespace
}  // namespace tandem::fake_cuda
