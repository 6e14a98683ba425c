// Groups of ranks that are threads of one process, but know of each other by a rendezvous and NCCL alone.
#include <algorithm>
#include <thread>

#include "comm/nccl/nccl_transport.hpp"
#include "comm/process_group.hpp"
#include "tests/comm/group_testing.hpp"
#include "tests/comm/processes/launch.hpp"
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

// Ranks meet to connect, too, which takes its time on a busy machine.
std::vector<std::unique_ptr<Group>> connect(std::span<Device* const> devices, double watchdog_seconds) {
  std::vector<Joined> ranks = launch_all(static_cast<int>(devices.size()), [&](RendezvousOptions& options) {
    options.limits.stall_seconds = std::max(watchdog_seconds, 2.0);
  });
  std::vector<std::unique_ptr<Group>> groups(devices.size());
  std::vector<std::thread> threads;
  std::vector<std::exception_ptr> errors(devices.size());
  for (std::size_t rank = 0; rank < devices.size(); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        if (ranks[rank].error) std::rethrow_exception(ranks[rank].error);
        groups[rank] = group_by_nccl(std::move(ranks[rank].rendezvous), *devices[rank], watchdog_seconds);
      } catch (...) {
        errors[rank] = std::current_exception();
        ranks[rank].rendezvous = nullptr;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
  return groups;
}

}  // namespace tandem::testing
