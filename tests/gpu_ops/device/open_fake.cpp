#include <utility>

#include "tests/gpu_ops/device/device_testing.hpp"
#include "tests/gpu_ops/device/fake_device.hpp"

namespace tandem::testing {
namespace {

fake_cuda::Machine& machine() {
  static fake_cuda::Machine settings{};
  return settings;
}

}  // namespace

std::unique_ptr<CudaDevice> open_test_device(std::size_t capacity, std::size_t pinned_piece) {
  fake_cuda::install(machine());
  return open_fake_device({.capacity = capacity, .pinned_piece = pinned_piece});
}

std::vector<std::unique_ptr<CudaDevice>> open_test_devices(int count, std::size_t capacity) {
  fake_cuda::Machine cards = machine();
  cards.cards.assign(static_cast<std::size_t>(count), fake_cuda::Card{});
  fake_cuda::install(std::move(cards));
  std::vector<std::unique_ptr<CudaDevice>> devices;
  for (int i = 0; i < count; ++i) devices.push_back(open_fake_device({.capacity = capacity, .ordinal = i}));
  return devices;
}

void delay_streams(std::uint64_t seed, int longest_us) {
  machine().seed = seed;
  machine().longest_delay_us = longest_us;
}

}  // namespace tandem::testing
