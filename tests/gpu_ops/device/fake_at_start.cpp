// For a program that knows nothing of the fake: installs a machine with one card before main.
#include "tests/gpu_ops/fake_runtime/fake_cuda.hpp"

namespace tandem::fake_cuda {
namespace {

const bool installed = [] {
  install(Machine{.longest_delay_us = 20});
  return true;
}();

}  // namespace
}  // namespace tandem::fake_cuda
