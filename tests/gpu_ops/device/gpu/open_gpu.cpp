#include <map>
#include <utility>

#include "cpu_ops/threads/parallel.hpp"
#include "cpu_ops/update/update_kernels.hpp"
#include "gpu_ops/ops/cuda_ops.hpp"
#include "tests/gpu_ops/device/device_testing.hpp"

namespace tandem::testing {
namespace {

CudaDeviceOptions options_of(int ordinal, std::size_t pinned_piece) {
  CudaDeviceOptions cuda;
  cuda.ordinal = ordinal;
  cuda.pinned_piece = pinned_piece;
  cuda.make_ops = [] { return make_cuda_ops(); };
  cuda.ops_key = cuda_ops_key;
  cuda.make_host_kernels = [](auto) { return make_host_update_kernels(make_parallel(1)); };
  return cuda;
}

/// The ceiling that a user gives counts context and libraries too, which are measured once in a process.
std::size_t reserved_on(int ordinal) {
  static std::map<int, std::size_t> measured;
  const auto known = measured.find(ordinal);
  if (known != measured.end()) return known->second;
  return measured[ordinal] = CudaDevice(options_of(ordinal, std::size_t{2} << 20)).info().reserved;
}

std::unique_ptr<CudaDevice> open(int ordinal, std::size_t capacity, std::size_t pinned_piece) {
  CudaDeviceOptions cuda = options_of(ordinal, pinned_piece);
  if (capacity > 0) cuda.memory = capacity + reserved_on(ordinal);
  return std::make_unique<CudaDevice>(std::move(cuda));
}

}  // namespace

std::unique_ptr<CudaDevice> open_test_device(std::size_t capacity, std::size_t pinned_piece) {
  const int first = probe_cuda().first_usable;
  return first < 0 ? nullptr : open(first, capacity, pinned_piece);
}

// From the first one that can be used on; where there are too few, several on one card.
std::vector<std::unique_ptr<CudaDevice>> open_test_devices(int count, std::size_t capacity) {
  const CudaProbe probe = probe_cuda();
  std::vector<std::unique_ptr<CudaDevice>> devices;
  for (int i = 0; i < count && probe.first_usable >= 0; ++i) {
    devices.push_back(
        open(probe.first_usable + i % (probe.devices - probe.first_usable), capacity, std::size_t{2} << 20));
  }
  return devices;
}

void delay_streams(std::uint64_t, int) {}

}  // namespace tandem::testing
