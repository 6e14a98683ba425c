// For a program that knows nothing of the fake: installs a machine with one card before main, and fails at the end
// where the program did what CUDA leaves undefined.
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "tests/gpu_ops/fake_runtime/fake_cuda.hpp"

namespace tandem::fake_cuda {
namespace {

void tell_complaints() {
  const std::vector<std::string> all = complaints();
  for (const std::string& complaint : all) std::fprintf(stderr, "fake CUDA: %s\n", complaint.c_str());
  constexpr int undefined = 99;
  if (!all.empty()) std::_Exit(undefined);
}

const bool installed = [] {
  install(Machine{.guarded = true, .longest_delay_us = 20});
  return std::atexit(tell_complaints) == 0;
}();

}  // namespace
}  // namespace tandem::fake_cuda
