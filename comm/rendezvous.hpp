#pragma once
// How ranks in several processes find each other, agree, and learn of each other's end. Rank 0 listens at an address,
// the others connect to it. Docs: docs/design/0042-ranks-in-processes.md.
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/assembly.hpp"
#include "core/device/group.hpp"

namespace tandem {

struct RendezvousOptions {
  Rank rank;
  std::string host = "127.0.0.1";  ///< name or number of an address of rank 0's machine: rank 0 listens there alone
  int port = 0;                    ///< on rank 0 0 takes a free one, which `listening` tells
  std::string secret;              ///< the secret of the launch, which never crosses the network
  std::vector<Fact> facts;         ///< properties in which all ranks have to agree
  AssemblyLimits limits;           ///< seconds until ranks are no longer waited for; rank 0's count
  double silence_seconds = 10.0;   ///< without a sign of life until a rank counts as lost; a fifth of it between two
  std::function<void(int port)> listening{};  ///< called on rank 0 before it waits for the others
  /// Take lines until all are there, on a thread of the rendezvous: for whom this rank waits, where that takes longer
  /// than limits.silent_seconds; and on rank 0 who was refused.
  std::function<void(const std::string& line)> notice{};
  std::function<void(const std::string& line)> warning{};
};

/// One rank's end. A thread of its own keeps the connection alive, and learns of the end of any rank whatever the
/// others wait for. Methods may be called from any thread.
class Rendezvous {
 public:
  /// Independent sequences of meetings: one for each channel of a group, for calls about device memory, for others.
  static constexpr std::size_t meetings = channel_count + 2;
  static constexpr std::size_t of_devices = channel_count;
  static constexpr std::size_t of_others = channel_count + 1;

  /// The rank that alone gets the values of a meeting; none: all do.
  using Receiver = std::optional<int>;

  /// Blocks until all ranks are there and agree, at most for limits.join_seconds. From then on nothing listens. A group
  /// of one neither listens nor connects. Throws, on every rank that has come: UsageError where ranks have one number,
  /// another number of ranks, other facts, another secret, or an address that is not one of rank 0's machine;
  /// DeviceError where an address cannot be had or reached, or a rank has not come (all are named); PeerError where one
  /// is lost meanwhile.
  explicit Rendezvous(RendezvousOptions options);
  /// Leaves.
  ~Rendezvous();
  Rendezvous(const Rendezvous&) = delete;
  Rendezvous& operator=(const Rendezvous&) = delete;

  Rank rank() const noexcept;
  /// Address in numbers by which this process and rank 0 reach each other; on rank 0 the one at which it has listened.
  /// Empty in a group of one.
  const std::string& address() const noexcept;

  /// Meets all ranks, each of which brings a value of at most value_limit bytes. Blocks; returns the values by rank.
  /// `call` says what the meeting is for, its first word in errors; it must be the same text on all ranks (MisuseError
  /// on all). Throws what has ended the group, unless all have come: PeerError, StalledError; MisuseError where this
  /// rank is in such a meeting already, which does not end the group by itself. With a `receiver`, which `call` names,
  /// that rank alone gets the values, and the others as many empty ones.
  std::vector<std::string> meet(std::size_t meeting, const std::string& call, std::string value,
                                Receiver receiver = {});

  /// Tells all ranks that this one cannot go on, which ends the group. The error names the first that failed.
  void fail(const std::exception_ptr& error) noexcept;
  /// Tells all ranks that this one makes no more calls, which ends the group for calls to which it has not come. Blocks
  /// until that is sent, at most for some seconds.
  void leave() noexcept;

  /// Error that has ended the group; null while it goes on.
  std::exception_ptr failure() const;
  /// Calls `stop` once when the group ends by a failure, at once where it has: for whoever moves bytes by other means.
  /// On a thread of the rendezvous; `stop` must be short and must not throw. Null: nothing is called from then on.
  void when_broken(std::function<void()> stop);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tandem
