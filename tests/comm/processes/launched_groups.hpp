#pragma once
// Groups of ranks that are threads of one process, but know of each other by a rendezvous alone.
#include <algorithm>
#include <exception>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "core/device/group.hpp"
#include "tests/comm/processes/launch.hpp"

namespace tandem::testing {

/// Makes the group of a rank that has joined the others, who make theirs at the same time.
using MakeGroup = std::function<std::unique_ptr<Group>(std::unique_ptr<Rendezvous>, int rank)>;

/// Groups by rank. Ranks meet to connect, too, which takes its time on a busy machine. Throws what a rank has thrown.
inline std::vector<std::unique_ptr<Group>> launch_groups(int count, double watchdog_seconds, const MakeGroup& make,
                                                         const Change& change = {},
                                                         const std::function<void(int port)>& listening = {}) {
  const auto patient = [&](RendezvousOptions& options) {
    options.limits.stall_seconds = std::max(watchdog_seconds, 2.0);
    if (change) change(options);
  };
  std::vector<Joined> ranks = launch_all(count, patient, listening);
  std::vector<std::unique_ptr<Group>> groups(ranks.size());
  std::vector<std::exception_ptr> errors(ranks.size());
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        if (ranks[rank].error) std::rethrow_exception(ranks[rank].error);
        groups[rank] = make(std::move(ranks[rank].rendezvous), static_cast<int>(rank));
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
