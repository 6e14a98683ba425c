// Groups of ranks that are threads of one process, but know of each other by a rendezvous and Gloo alone.
#include <algorithm>

#include "comm/gloo_transport.hpp"
#include "comm/process_group.hpp"
#include "tests/comm/group_testing.hpp"
#include "tests/comm/processes/launch.hpp"

namespace tandem::testing {

// Ranks meet to connect, too, which takes its time on a busy machine.
std::vector<std::unique_ptr<Group>> connect(std::span<Device* const> devices, double watchdog_seconds) {
  const int count = static_cast<int>(devices.size());
  std::vector<Joined> ranks = launch_all(
      count, [&](RendezvousOptions& options) { options.limits.stall_seconds = std::max(watchdog_seconds, 2.0); });
  std::vector<std::unique_ptr<Group>> groups(devices.size());
  std::vector<std::thread> threads;
  std::vector<std::exception_ptr> errors(devices.size());
  for (std::size_t rank = 0; rank < devices.size(); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        if (ranks[rank].error) std::rethrow_exception(ranks[rank].error);
        auto transport = make_gloo_transport(*ranks[rank].rendezvous, *devices[rank], watchdog_seconds);
        groups[rank] = make_process_group(std::move(ranks[rank].rendezvous), std::move(transport), *devices[rank]);
      } catch (...) {
        errors[rank] = std::current_exception();
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
