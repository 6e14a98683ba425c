#pragma once
// Ranks that find each other by a rendezvous, each on a thread of its own.
#include <atomic>
#include <exception>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "comm/rendezvous.hpp"

namespace tandem::testing {

/// One rank's end, or what its constructor has thrown.
struct Joined {
  std::unique_ptr<Rendezvous> rendezvous;
  std::exception_ptr error;
};

/// Options of each rank, with `change` made to them.
using Change = std::function<void(RendezvousOptions&)>;

inline RendezvousOptions options_for(int rank, int count) {
  RendezvousOptions options;
  options.rank = {rank, count};
  options.secret = "the secret of a launch";
  options.facts = {{"version", "0.1.0"}, {"model", "tiny"}};
  options.limits = {.join_seconds = 20.0, .stall_seconds = 20.0};
  return options;
}

inline Joined join(RendezvousOptions options) {
  try {
    return {std::make_unique<Rendezvous>(std::move(options)), nullptr};
  } catch (...) {
    return {nullptr, std::current_exception()};
  }
}

/// Starts rank 0 and then, once it listens at a free port, the ranks `others`, with the options of `change`.
/// `listening` is called with the port before the others start.
inline std::vector<Joined> launch(int count, const std::vector<int>& others, const Change& change = {},
                                  const std::function<void(int port)>& listening = {}) {
  std::vector<Joined> ranks(others.size() + 1);
  std::promise<int> port;
  std::vector<std::thread> threads;
  const auto start = [&](std::size_t at, int rank, int at_port) {
    RendezvousOptions options = options_for(rank, count);
    options.port = at_port;
    if (rank == 0) options.listening = [&](int bound) { port.set_value(bound); };
    if (change) change(options);
    ranks[at] = join(std::move(options));
  };
  threads.emplace_back(start, 0, 0, 0);
  if (count > 1) {
    const int bound = port.get_future().get();
    if (listening) listening(bound);
    for (std::size_t i = 0; i < others.size(); ++i) threads.emplace_back(start, i + 1, others[i], bound);
  }
  for (std::thread& thread : threads) thread.join();
  return ranks;
}

inline std::vector<Joined> launch_all(int count, const Change& change = {},
                                      const std::function<void(int port)>& listening = {}) {
  std::vector<int> others;
  for (int rank = 1; rank < count; ++rank) others.push_back(rank);
  return launch(count, others, change, listening);
}

}  // namespace tandem::testing
