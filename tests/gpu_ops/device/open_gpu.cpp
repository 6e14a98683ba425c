#include "cpu_ops/parallel.hpp"
#include "cpu_ops/update_kernels.hpp"
#include "gpu_ops/cuda_ops.hpp"
#include "tests/gpu_ops/device/device_testing.hpp"

namespace tandem::testing {
namespace {

CudaDeviceOptions options_of(std::size_t pinned_piece) {
  CudaDeviceOptions cuda;
  cuda.ordinal = probe_cuda().first_usable;
  cuda.pinned_piece = pinned_piece;
  cuda.make_ops = [] { return make_cuda_ops(); };
  cuda.ops_key = cuda_ops_key;
  cuda.make_host_kernels = [](auto) { return make_host_update_kernels(make_parallel(1)); };
  return cuda;
}

}  // namespace

std::unique_ptr<CudaDevice> open_test_device(std::size_t capacity, std::size_t pinned_piece) {
  if (probe_cuda().first_usable < 0) return nullptr;
  CudaDeviceOptions cuda = options_of(pinned_piece);
  // The ceiling that a user gives counts context and libraries too, which are measured once in a process.
  static const std::size_t reserved = CudaDevice(options_of(pinned_piece)).info().reserved;
  cuda.memory = capacity + reserved;
  return std::make_unique<CudaDevice>(std::move(cuda));
}

void delay_streams(std::uint64_t, int) {}

}  // namespace tandem::testing
