#include "comm/local_group.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

#include "comm/group_call.hpp"
#include "core/base/error.hpp"
#include "core/base/stall.hpp"
#include "core/device/watched_wait.hpp"

namespace tandem {
namespace {

constexpr int every_rank = -1;

/// A rank's contribution to a call. Owned by the caller, and read by others only while all of them are in the call.
struct Call {
  std::string_view name;
  std::span<const ByteRange> parts{};  ///< parts of device memory; empty for calls about host memory
  int root = 0;                        ///< calls about host memory: the rank that sends
  int receiver = every_rank;           ///< calls about host memory: the rank that receives
  std::size_t bytes = 0;               ///< calls about host memory: their length
  const std::byte* data = nullptr;     ///< bytes that the others read

  bool agrees_with(const Call& other) const {
    return name == other.name && root == other.root && receiver == other.receiver && bytes == other.bytes &&
           std::ranges::equal(parts, other.parts);
  }
  std::string text() const {
    if (!parts.empty()) return text_of_call(name, parts);
    return receiver == every_rank ? text_of_broadcast(root, bytes) : text_of_send(root, receiver, bytes);
  }
};

/// Shared state of all members: who has come to which call, and the error that has ended the group. A call meets twice:
/// to show the contribution of each rank, and to see that all are done with it.
class Members {
 public:
  Members(std::span<Device* const> devices, double watchdog_seconds)
      : limit_(watchdog_seconds), devices_(devices.begin(), devices.end()) {
    for (Meeting& meeting : meetings_) {
      for (auto& calls : meeting.calls) calls.resize(devices_.size());
      meeting.here.resize(devices_.size());
    }
  }
  int count() const noexcept { return static_cast<int>(devices_.size()); }
  Device& device(int rank) const noexcept { return *devices_[static_cast<std::size_t>(rank)]; }
  double limit() const noexcept { return limit_; }

  /// Each sequence of calls has a meeting of its own: each channel, and calls about device memory.
  static constexpr std::size_t of_devices = channel_count;
  static std::size_t of(Channel channel) noexcept { return static_cast<std::size_t>(channel); }

  /// Blocks until all ranks have brought their calls, which lie there by rank until this one meets again. Throws what
  /// has ended the group, unless all had come before.
  const std::vector<Call>& meet(std::size_t which, int rank, const Call& call);
  /// Ends the call of a rank that leaves it by an error, while others may still read its memory: blocks until all leave
  /// it, though no longer than the watchdog's time.
  void withdraw(std::size_t which) noexcept;

  void fail(int rank, const std::exception_ptr& error) noexcept;
  void leave(int rank) noexcept;

 private:
  struct Meeting {
    std::condition_variable changed;
    std::uint64_t generation = 0;
    int arrived = 0;
    int withdrawn = 0;
    std::vector<bool> here;  ///< ranks that have come
    /// Calls by generation, odd and even: nobody can come to the next but one before all have come to the next, and so
    /// have read these.
    std::array<std::vector<Call>, 2> calls;
  };

  void wait_for_all(std::unique_lock<std::mutex>& lock, Meeting& meeting, std::string_view what);
  void give_up(const Meeting& meeting, std::string_view what, double seconds);
  std::exception_ptr mismatch(const std::vector<Call>& calls) const;
  void end(std::exception_ptr failure) noexcept;

  const double limit_;
  const std::vector<Device*> devices_;
  std::mutex mutex_;
  std::exception_ptr failure_;  ///< the first one
  std::array<Meeting, channel_count + 1> meetings_;
};

const std::vector<Call>& Members::meet(std::size_t which, int rank, const Call& call) {
  Meeting& meeting = meetings_.at(which);
  std::unique_lock lock(mutex_);
  if (failure_) std::rethrow_exception(failure_);
  const auto at = static_cast<std::size_t>(rank);
  if (meeting.here[at]) throw MisuseError(fmt::format("rank {} calls {} while it is in another call", rank, call.name));
  meeting.here[at] = true;
  std::vector<Call>& calls = meeting.calls[meeting.generation % 2];
  calls[at] = call;
  if (++meeting.arrived < count()) {
    wait_for_all(lock, meeting, call.name);
    return calls;
  }
  if (std::exception_ptr misuse = mismatch(calls)) {
    end(misuse);
    std::rethrow_exception(misuse);
  }
  meeting.arrived = 0;
  meeting.here.assign(meeting.here.size(), false);
  ++meeting.generation;
  meeting.changed.notify_all();
  return calls;
}

void Members::wait_for_all(std::unique_lock<std::mutex>& lock, Meeting& meeting, std::string_view what) {
  const std::uint64_t generation = meeting.generation;
  const auto made = [&] { return static_cast<std::uint64_t>(meeting.arrived); };
  ProgressWatch progress(limit_, made());
  // A rank that has come with all others has had the call, even if one of them has failed since.
  while (!meeting.changed.wait_for(lock, watch_tick, [&] { return meeting.generation != generation || failure_; })) {
    if (const auto seconds = progress.stalled(made())) give_up(meeting, what, *seconds);
  }
  if (meeting.generation == generation) std::rethrow_exception(failure_);
}

// Under the lock, so that the stall is told before anybody gets the error.
void Members::give_up(const Meeting& meeting, std::string_view what, double seconds) {
  std::string missing;
  for (int rank = 0; rank < count(); ++rank) {
    if (!meeting.here[static_cast<std::size_t>(rank)])
      missing += fmt::format("{}rank {}", missing.empty() ? "" : ", ", rank);
  }
  const StalledError error = stalled(fmt::format("{} of the group", what), seconds, missing);
  report_stall(error);
  end(std::make_exception_ptr(error));
}

std::exception_ptr Members::mismatch(const std::vector<Call>& calls) const {
  std::string differing;
  for (std::size_t rank = 1; rank < calls.size(); ++rank) {
    if (!calls[rank].agrees_with(calls[0])) differing += fmt::format(", rank {} calls {}", rank, calls[rank].text());
  }
  if (differing.empty()) return nullptr;
  return std::make_exception_ptr(MisuseError("ranks of a group differ in what they call",
                                             fmt::format("rank 0 calls {}{}", calls[0].text(), differing)));
}

void Members::end(std::exception_ptr failure) noexcept {
  if (failure_) return;
  failure_ = std::move(failure);
  for (Meeting& meeting : meetings_) meeting.changed.notify_all();
}

void Members::withdraw(std::size_t which) noexcept {
  Meeting& meeting = meetings_.at(which);
  std::unique_lock lock(mutex_);
  ++meeting.withdrawn;
  meeting.changed.notify_all();
  ProgressWatch progress(limit_, 0);
  while (!meeting.changed.wait_for(lock, watch_tick, [&] { return meeting.withdrawn == count(); })) {
    if (progress.stalled(0)) return;
  }
}

void Members::fail(int rank, const std::exception_ptr& error) noexcept {
  const std::lock_guard lock(mutex_);
  try {
    end(std::make_exception_ptr(PeerError(fmt::format("rank {} failed", rank), message_of(error))));
  } catch (...) {  // no memory for words: that is told instead
    end(std::current_exception());
  }
}

void Members::leave(int rank) noexcept {
  const std::lock_guard lock(mutex_);
  try {
    end(std::make_exception_ptr(PeerError(fmt::format("rank {} has left", rank))));
  } catch (...) {  // no memory for the error: its own exception then ends the group
    end(std::current_exception());
  }
}

/// Two events of each rank: what it shows is written; it has read what it takes. Recorded anew in the next call only
/// once all have queued their waits for the last one, since all have come to a meeting since.
struct Marks {
  Event shown;
  Event taken;
};

/// Common to all members: a rank's marks are waited for by the others also when its member is gone.
struct Shared {
  Shared(std::span<Device* const> devices, double watchdog_seconds) : members(devices, watchdog_seconds) {
    for (Device* device : devices) marks.push_back({device->make_event(), device->make_event()});
  }
  Members members;
  std::vector<Marks> marks;  ///< by rank
};

class LocalGroup final : public Group {
 public:
  LocalGroup(std::shared_ptr<Shared> shared, int rank)
      : shared_(std::move(shared)), members_(shared_->members), rank_(rank), device_(members_.device(rank)) {}
  ~LocalGroup() override { LocalGroup::leave(); }
  LocalGroup(const LocalGroup&) = delete;
  LocalGroup& operator=(const LocalGroup&) = delete;

  Rank rank() const noexcept override { return {rank_, members_.count()}; }
  void all_gather(std::byte* buffer, std::span<const ByteRange> parts, StreamView stream) override;
  void all_to_all(const std::byte* from, std::span<const ByteRange> parts, std::byte* to, StreamView stream) override;
  void broadcast(Channel channel, int root, std::span<std::byte> bytes) override;
  void send(Channel channel, int from, int to, std::span<std::byte> bytes) override;
  void fail(std::exception_ptr error) noexcept override { members_.fail(rank_, error); }
  void leave() noexcept override;

 private:
  template <class Body>
  void or_fail(const Body& body);
  template <class Body, class Finish>
  void among_all(std::size_t meeting, const Call& call, const Body& body, const Finish& finish);
  template <class Pull>
  void on_devices(const Call& call, StreamView stream, const Pull& pull);
  void on_hosts(Channel channel, const Call& call, std::span<std::byte> bytes);
  void come_to_rest(StreamView stream, std::string_view what) const noexcept;
  template <class Each>
  void for_peers(const Each& each) const;
  void wait_for_peers(StreamView stream, Event Marks::*mark) const;

  const std::shared_ptr<Shared> shared_;
  Members& members_;
  const int rank_;
  Device& device_;
};

template <class Each>
void LocalGroup::for_peers(const Each& each) const {
  // Begins with the next rank, so that not all read from one.
  for (int i = 1; i < members_.count(); ++i) each((rank_ + i) % members_.count());
}

// Nobody records again what is waited for here: that would take a call of this rank.
void LocalGroup::leave() noexcept {
  members_.leave(rank_);
  ProgressWatch watch(members_.limit(), 0);
  for_peers([&](int peer) {
    try {
      const Event& taken = shared_->marks[static_cast<std::size_t>(peer)].taken;
      while (!members_.device(peer).wait_for(taken, watch_tick) && !watch.stalled(0)) {
      }
    } catch (...) {  // the peer's failure, of which it tells others itself
    }
  });
}

/// Runs `body`; an exception of it ends the calls of the other ranks, who would wait for this one, and is rethrown.
template <class Body>
void LocalGroup::or_fail(const Body& body) {
  try {
    body();
  } catch (...) {
    fail(std::current_exception());
    throw;
  }
}

/// Calls `body` with the calls of all between two meetings: all are there, and all are done. Where it is not to be so,
/// nobody throws before nobody reads what another has shown: `finish` waits for this rank's reading.
template <class Body, class Finish>
void LocalGroup::among_all(std::size_t meeting, const Call& call, const Body& body, const Finish& finish) {
  const std::vector<Call>& calls = members_.meet(meeting, rank_, call);
  try {
    body(calls);
    members_.meet(meeting, rank_, call);
  } catch (...) {
    fail(std::current_exception());
    finish();
    members_.withdraw(meeting);
    throw;
  }
}

void LocalGroup::wait_for_peers(StreamView stream, Event Marks::*mark) const {
  for_peers([&](int peer) {
    device_.wait_for_peer(stream, members_.device(peer), shared_->marks[static_cast<std::size_t>(peer)].*mark);
  });
}

/// First all wait for what the others show, and take it; then all wait until the others have taken theirs.
template <class Pull>
void LocalGroup::on_devices(const Call& call, StreamView stream, const Pull& pull) {
  or_fail([&] {
    device_.require_own(stream);
    require_parts(call.parts, members_.count());
    const Marks& mine = shared_->marks[static_cast<std::size_t>(rank_)];
    device_.record(mine.shown, stream);
    among_all(
        Members::of_devices, call,
        [&](const std::vector<Call>& calls) {
          wait_for_peers(stream, &Marks::shown);
          for_peers([&](int peer) { pull(peer, calls[static_cast<std::size_t>(peer)].data); });
          device_.record(mine.taken, stream);
        },
        [&] { come_to_rest(stream, call.name); });
    wait_for_peers(stream, &Marks::taken);
  });
}

// The call throws what it failed by: whatever the stream may say is no news.
void LocalGroup::come_to_rest(StreamView stream, std::string_view what) const noexcept {
  try {
    wait_or_give_up(device_, stream, {.what = what, .limit_seconds = members_.limit()});
  } catch (...) {
  }
}

void LocalGroup::all_gather(std::byte* buffer, std::span<const ByteRange> parts, StreamView stream) {
  on_devices({.name = "all_gather", .parts = parts, .data = buffer}, stream, [&](int peer, const std::byte* theirs) {
    const ByteRange part = parts[static_cast<std::size_t>(peer)];
    device_.copy_from(members_.device(peer), buffer + part.begin, theirs + part.begin, part.size(), stream);
  });
}

void LocalGroup::all_to_all(const std::byte* from, std::span<const ByteRange> parts, std::byte* to, StreamView stream) {
  on_devices({.name = "all_to_all", .parts = parts, .data = from}, stream, [&](int peer, const std::byte* theirs) {
    const ByteRange own = parts[static_cast<std::size_t>(rank_)];
    const auto slot = static_cast<std::size_t>(peer < rank_ ? peer : peer - 1);
    device_.copy_from(members_.device(peer), to + slot * own.size(), theirs + own.begin, own.size(), stream);
  });
}

void LocalGroup::broadcast(Channel channel, int root, std::span<std::byte> bytes) {
  or_fail([&] {
    require_rank(root, members_.count(), "broadcast");
    on_hosts(channel, {.name = "broadcast", .root = root, .bytes = bytes.size(), .data = bytes.data()}, bytes);
  });
}

void LocalGroup::send(Channel channel, int from, int to, std::span<std::byte> bytes) {
  or_fail([&] {
    require_rank(from, members_.count(), "send");
    require_rank(to, members_.count(), "send to");
    on_hosts(channel, {.name = "send", .root = from, .receiver = to, .bytes = bytes.size(), .data = bytes.data()},
             bytes);
  });
}

/// Copies the root's bytes into `bytes` where this rank receives them.
void LocalGroup::on_hosts(Channel channel, const Call& call, std::span<std::byte> bytes) {
  const bool receives = rank_ != call.root && (call.receiver == every_rank || call.receiver == rank_);
  among_all(
      Members::of(channel), call,
      [&](const std::vector<Call>& calls) {
        if (!receives || bytes.empty()) return;
        std::memcpy(bytes.data(), calls[static_cast<std::size_t>(call.root)].data, bytes.size());
      },
      [] {});
}

}  // namespace

std::vector<std::unique_ptr<Group>> make_local_group(std::span<Device* const> devices, double watchdog_seconds) {
  if (devices.empty()) throw MisuseError("a group of no devices is asked for");
  for (const Device* device : devices) {
    if (device == nullptr) throw MisuseError("a device of a group is null");
    if (device->info().kind != devices[0]->info().kind) {
      throw MisuseError("devices of a group differ in kind",
                        fmt::format("'{}' and '{}'", devices[0]->info().kind, device->info().kind));
    }
  }
  const auto shared = std::make_shared<Shared>(devices, watchdog_seconds);
  std::vector<std::unique_ptr<Group>> members;
  for (int rank = 0; rank < shared->members.count(); ++rank) {
    members.push_back(std::make_unique<LocalGroup>(shared, rank));
  }
  return members;
}

}  // namespace tandem
