#pragma once
// An emulated link between host and device: bytes take time. Internal to cpu_ops.
#include <chrono>
#include <cstddef>
#include <functional>
#include <mutex>

namespace tandem {

/// The time that an emulated link goes by; tests give one of their own.
struct LinkClock {
  using Time = std::chrono::steady_clock::time_point;
  std::function<Time()> now;
  std::function<void(Time)> sleep_until;
  static LinkClock real();
};

/// One direction, shared by all streams: a copy of n bytes occupies it for n / rate seconds, and copies
/// follow one another in the order in which their streams reach them. Thread-safe.
class HostLink {
 public:
  /// A rate of 0 takes no time. Throws UsageError where it is negative or not finite.
  explicit HostLink(double bytes_per_second, LinkClock clock = LinkClock::real());

  /// Moves by `copy` (called at once), then blocks until the link would be done with `bytes`.
  void carry(std::size_t bytes, const std::function<void()>& copy);

 private:
  LinkClock::Time book(std::size_t bytes);

  const double rate_;
  const LinkClock clock_;
  std::mutex mutex_;
  LinkClock::Time free_at_{};
};

}  // namespace tandem
