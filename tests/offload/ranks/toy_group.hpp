#pragma once
// Toy trainers that train one model together, each in a thread of its own.
#include <algorithm>
#include <exception>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "tests/comm/connect.hpp"
#include "tests/offload/toy/trainer.hpp"

namespace tandem::testing {

/// Exception of each rank; null where it came to its end.
using Failures = std::vector<std::exception_ptr>;

/// Makes the group of devices, as `connect` does.
using Connect = std::function<std::vector<std::unique_ptr<Group>>(std::span<Device* const>, double watchdog_seconds)>;

/// Runs `body(trainer, rank)` in a thread for each of so many ranks. `options` gives each what it is made of.
inline Failures run_toy_group(int ranks, const std::function<ToyOptions(int rank)>& options,
                              const std::function<void(ToyTrainer&, int rank)>& body,
                              const Connect& connected = connect) {
  std::vector<HostDeviceOptions> of_devices;
  for (int rank = 0; rank < ranks; ++rank) of_devices.push_back(options(rank).device);
  std::vector<std::shared_ptr<ToyDevice>> devices;  // outlive the group
  for (auto& device : make_toy_devices(of_devices)) devices.push_back(std::move(device));
  std::vector<Device*> pointers;
  for (const auto& device : devices) pointers.push_back(&device->device());
  std::vector<std::unique_ptr<Group>> group = connected(pointers, options(0).offload.watchdog_seconds);
  // A device is read by its peers until all have stopped.
  std::vector<std::unique_ptr<ToyTrainer>> trainers(devices.size());
  Failures failures(devices.size());
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < devices.size(); ++i) {
    threads.emplace_back([&, i] {
      const int rank = static_cast<int>(i);
      try {
        trainers[i] = std::make_unique<ToyTrainer>(options(rank), devices[i], group[i].get());
        body(*trainers[i], rank);
      } catch (...) {
        failures[i] = std::current_exception();
        if (trainers[i]) group[i]->fail(failures[i]);  // an engine that cannot be made has told the others itself
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return failures;
}

inline void expect_no_failure(const Failures& failures) {
  for (const std::exception_ptr& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
}

/// Options of each of so many ranks that have the micro-batches of `o` together.
inline ToyOptions share_of(ToyOptions o, int ranks) {
  o.micro_batches /= ranks;
  o.at_once = std::min(o.at_once, o.micro_batches);
  return o;
}

/// Options `o` with `share` of the state on each rank's host in a file instead.
inline ToyOptions with_state_in_files(ToyOptions o, int ranks, double share) {
  ToyOptions of_rank = o;
  of_rank.micro_batches = std::max(1, o.micro_batches / ranks);
  of_rank.offload.rank = {0, ranks};
  const OffloadOptions in_file = with_state_in_file(of_rank, share).offload;
  o.offload.subgroup_size = in_file.subgroup_size;
  o.offload.state_folder = in_file.state_folder;
  o.offload.host_memory = *in_file.host_memory * static_cast<std::size_t>(ranks);
  return o;
}

/// Runs `body` on ranks that are alike and have the micro-batches of `o` together. Throws what one of them does.
inline void with_toy_group(const ToyOptions& o, int ranks, const std::function<void(ToyTrainer&, int rank)>& body) {
  expect_no_failure(run_toy_group(
      ranks, [of_rank = share_of(o, ranks)](int) { return of_rank; }, body));
}

/// Trains with `ranks` ranks, all micro-batches of `o` in their order; returns each rank's result.
inline std::vector<ToyResult> train_toy_group(const ToyOptions& o, int ranks) {
  std::vector<ToyResult> results(static_cast<std::size_t>(ranks));
  with_toy_group(o, ranks, [&](ToyTrainer& t, int rank) { results[static_cast<std::size_t>(rank)] = t.run(); });
  return results;
}

}  // namespace tandem::testing
