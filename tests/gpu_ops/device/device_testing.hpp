#pragma once
// The CUDA device that tests run on, made by the file that the program is linked with: over the fake runtime,
// or the first GPU of this machine.
#include <cstddef>
#include <memory>
#include <vector>

#include "gpu_ops/device/cuda_device.hpp"

namespace tandem::testing {

/// Null, with the reason said, where there is no GPU: the test is to be skipped.
/// `capacity`: of what may be allocated; 0: what is free, less a margin. `pinned_piece`: bytes of host memory
/// registered at once.
std::unique_ptr<CudaDevice> open_test_device(std::size_t capacity = std::size_t{64} << 20,
                                             std::size_t pinned_piece = std::size_t{2} << 20);
/// Several with this capacity each, on cards of their own where there are so many. None where there is no GPU.
std::vector<std::unique_ptr<CudaDevice>> open_test_devices(int count, std::size_t capacity);
/// Largest random delay of the fake's streams in microseconds from now on, and the seed that draws them; a GPU
/// has delays of its own.
void delay_streams(std::uint64_t seed, int longest_us);

/// Bytes that differ from each other and from what another `key` gives.
inline std::vector<std::byte> pattern(std::size_t bytes, std::size_t key) {
  std::vector<std::byte> values(bytes);
  for (std::size_t i = 0; i < bytes; ++i) values[i] = static_cast<std::byte>((i * 7 + key * 31 + i / 251) & 0xFF);
  return values;
}

}  // namespace tandem::testing

/// A device, or the test ends here as skipped.
#define TANDEM_OPEN_OR_SKIP(name, ...)                                      \
  const auto name##_owner = tandem::testing::open_test_device(__VA_ARGS__); \
  if (!name##_owner) GTEST_SKIP() << tandem::probe_cuda().why_none;         \
  tandem::CudaDevice& name = *name##_owner
