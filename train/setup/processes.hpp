#pragma once
// The processes that train one model together, as each of them sees the others.
#include <cstddef>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "comm/assembly.hpp"
#include "comm/launch_facts.hpp"
#include "core/device/device.hpp"
#include "core/device/group.hpp"

namespace tandem {

class Rendezvous;

/// One process alone, which agrees with itself, or one of several, with a rank each. Methods but `fail` are calls of
/// all processes, made alike and in one order by the thread that drives training. They block, and throw what has ended
/// the launch: PeerError that names another rank, StalledError.
class Processes {
 public:
  /// One process alone.
  Processes() = default;
  /// One of several. Blocks until all are there and agree on `facts`; logs for whom it waits, where that takes seconds.
  /// Throws as Rendezvous.
  Processes(const LaunchFacts& launch, std::vector<Fact> facts);
  /// Leaves the others.
  ~Processes();
  Processes(const Processes&) = delete;
  Processes& operator=(const Processes&) = delete;

  bool several() const noexcept { return rank_.count > 1; }
  /// Whether this process writes files and speaks: rank 0, or the only one.
  bool is_first() const noexcept { return rank_.index == 0; }
  /// Number of this process among all, which is that of its one rank where there are several.
  Rank rank() const noexcept { return rank_; }
  /// Number of this process among those on its machine.
  int local_rank() const noexcept { return local_rank_; }

  /// Values of all, by rank, of at most 64 KiB each. `what`: name of the call, for errors.
  std::vector<std::string> gather(std::string_view what, std::string own);
  /// Bytes of all, by rank; each has as many.
  std::vector<std::string> gather_bytes(std::string_view what, std::span<const std::byte> own);
  /// Value of rank 0.
  std::string of_first(std::string_view what, std::string own);
  bool of_first(std::string_view what, bool own);
  /// Whether it is so on any rank, or on all.
  bool any(std::string_view what, bool own);
  bool all(std::string_view what, bool own) { return !any(what, !own); }
  /// Throws UsageError on all ranks where their facts differ: the first one, with the ranks of each value.
  void agree(const std::vector<Fact>& facts);

  /// Group of the ranks, whose bytes on `device` move by NCCL between GPUs and by Gloo between host devices; several()
  /// only, once. Throws DeviceError where connections cannot be had.
  std::unique_ptr<Group> make_group(Device& device, double watchdog_seconds);

  /// Tells the others that this process cannot go on. Does nothing where there are none.
  void fail(const std::exception_ptr& error) noexcept;
  /// Runs `body`; what it throws is told to the others before memory goes that they wait for, and rethrown.
  template <class Body>
  auto or_fail(const Body& body) {
    try {
      return body();
    } catch (...) {
      fail(std::current_exception());
      throw;
    }
  }

 private:
  Rank rank_;
  int local_rank_ = 0;
  std::shared_ptr<Rendezvous> rendezvous_;  ///< null where there is one process
};

}  // namespace tandem
