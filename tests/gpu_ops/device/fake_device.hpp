#pragma once
// A CUDA device on a fake machine, with the kernels that a real one has.
#include <cstddef>
#include <functional>
#include <memory>
#include <utility>

#include "cpu_ops/device/wrapped_kernels.hpp"
#include "cpu_ops/threads/parallel.hpp"
#include "cpu_ops/update/update_kernels.hpp"
#include "gpu_ops/device/cuda_device.hpp"
#include "gpu_ops/ops/cuda_ops.hpp"
#include "tests/gpu_ops/fake_runtime/fake_cuda.hpp"

namespace tandem::testing {

struct FakeDeviceOptions {
  std::size_t capacity = 0;  ///< bytes that may be allocated; 0: the free memory, less a margin
  int update_threads = 1;
  std::size_t pinned_piece = std::size_t{2} << 20;  ///< small, so that copies cross pieces
  int ordinal = 0;
  DeviceAllocator allocator{};
  Notice pageable{};                      ///< CudaDeviceOptions::pageable
  Notice slower_peers{};                  ///< CudaDeviceOptions::slower_peers
  std::function<void()> before_update{};  ///< HostFaults::before_update
};

inline CudaDeviceOptions cuda_options(const FakeDeviceOptions& options) {
  CudaDeviceOptions cuda;
  cuda.ordinal = options.ordinal;
  cuda.pinned_piece = options.pinned_piece;
  cuda.pageable = options.pageable;
  cuda.slower_peers = options.slower_peers;
  cuda.allocator = options.allocator;
  cuda.make_ops = [] { return make_cuda_ops(); };
  cuda.ops_key = cuda_ops_key;
  cuda.make_host_kernels = [threads = options.update_threads, before = options.before_update](auto) {
    auto kernels = make_host_update_kernels(make_parallel(threads));
    if (!before) return kernels;
    return make_wrapped_kernels(std::move(kernels), [before](auto, const auto& work) {
      before();
      work();
    });
  };
  return cuda;
}

inline std::unique_ptr<CudaDevice> open_fake_device(const FakeDeviceOptions& options = {}) {
  CudaDeviceOptions cuda = cuda_options(options);
  // The ceiling of all that the process takes is what a user gives; context and libraries are part of it.
  if (options.capacity > 0) cuda.memory = options.capacity + CudaDevice(cuda_options(options)).info().reserved;
  return std::make_unique<CudaDevice>(std::move(cuda));
}

}  // namespace tandem::testing
