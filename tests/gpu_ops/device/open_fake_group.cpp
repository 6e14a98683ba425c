// Ranks of a group on the fake machine: each on a card of its own, or all on one.
#include "tests/comm/group_testing.hpp"
#include "tests/gpu_ops/device/fake_device.hpp"

namespace tandem::testing {

std::vector<std::unique_ptr<Device>> open_group_devices(int ranks, std::uint64_t seed) {
  const bool one_card = seed % 3 == 2;
  fake_cuda::Machine machine{.seed = seed, .longest_delay_us = 100};
  machine.cards.assign(static_cast<std::size_t>(one_card ? 1 : ranks), fake_cuda::Card{});
  machine.peers = seed % 3 == 1;
  fake_cuda::install(std::move(machine));
  std::vector<std::unique_ptr<Device>> devices;
  for (int rank = 0; rank < ranks; ++rank) {
    devices.push_back(open_fake_device({.capacity = std::size_t{8} << 20, .ordinal = one_card ? 0 : rank}));
  }
  return devices;
}

std::vector<std::string> complaints_of_devices() { return fake_cuda::complaints(); }

}  // namespace tandem::testing
