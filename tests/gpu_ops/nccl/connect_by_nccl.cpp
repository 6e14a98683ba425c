// Groups of ranks that are threads of one process, but know of each other by a rendezvous and NCCL alone.
#include <utility>

#include "comm/nccl/nccl_transport.hpp"
#include "comm/process_group.hpp"
#include "tests/comm/group_testing.hpp"
#include "tests/comm/processes/launched_groups.hpp"
#include "tests/gpu_ops/device/fake_device.hpp"
#include "tests/gpu_ops/nccl/nccl_testing.hpp"
#include "tests/gpu_ops/nccl/one/nccl_of_one.hpp"

namespace tandem::testing {

const nccl::Library& find_nccl() {
  fake_nccl();
  return nccl::load();
}

std::unique_ptr<Group> group_by_nccl(std::unique_ptr<Rendezvous> rendezvous, Device& device, double watchdog_seconds) {
  auto transport = make_nccl_transport(*rendezvous, device, watchdog_seconds);
  return make_process_group(std::move(rendezvous), std::move(transport), device);
}

// NCCL takes no card twice.
std::vector<std::unique_ptr<Device>> open_group_devices(int ranks, std::uint64_t seed) {
  fake_cuda::Machine machine{.seed = seed, .longest_delay_us = 100};
  machine.cards.assign(static_cast<std::size_t>(ranks), fake_cuda::Card{});
  fake_cuda::install(std::move(machine));
  const fake_nccl::Behaviour behaviour{.longest_delay_us = 300, .tells_lost_ranks = seed % 2 == 0};
  fake_nccl().behave(&behaviour);
  std::vector<std::unique_ptr<Device>> devices;
  for (int rank = 0; rank < ranks; ++rank) {
    devices.push_back(open_fake_device({.capacity = std::size_t{8} << 20, .ordinal = rank}));
  }
  return devices;
}

std::vector<std::string> complaints_of_devices() { return fake_cuda::complaints(); }

std::vector<std::unique_ptr<Group>> connect(std::span<Device* const> devices, double watchdog_seconds) {
  fake_nccl();
  const auto make = [&](std::unique_ptr<Rendezvous> rendezvous, int rank) {
    return group_by_nccl(std::move(rendezvous), *devices[static_cast<std::size_t>(rank)], watchdog_seconds);
  };
  return launch_groups(static_cast<int>(devices.size()), watchdog_seconds, make);
}

}  // namespace tandem::testing
