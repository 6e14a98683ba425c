#pragma once
// Makes work take as long as it would at a given rate: emulated links and CPUs. Internal to cpu_ops.
#include <chrono>
#include <functional>
#include <mutex>

namespace tandem {

/// The time that a pacer goes by; tests give one of their own.
struct PacerClock {
  using Time = std::chrono::steady_clock::time_point;
  std::function<Time()> now;
  std::function<void(Time)> sleep_until;
  static PacerClock real();
};

/// Something that does one piece of work after another at a rate, such as one direction of a link, whoever asks
/// for it. Thread-safe; work of several threads is paced in the order in which they reach it.
class Pacer {
 public:
  /// Units of work per second; 0: work takes the time that it takes. Throws UsageError, with `what` paced, where
  /// the rate is negative or not finite.
  Pacer(const char* what, double rate, PacerClock clock = PacerClock::real());

  /// Does `work` (called at once), then blocks until `amount` units at the rate would be done. A thread wakes from
  /// its sleep some time after it was to: the next piece, where it follows at once, makes up for that, so that the
  /// rate holds over many short pieces. Time spent idle is not made up for.
  void run(double amount, const std::function<void()>& work);

 private:
  PacerClock::Time book(double amount);

  const double rate_;
  const PacerClock clock_;
  std::mutex mutex_;
  PacerClock::Time free_at_{};              ///< when the work so far would be done
  PacerClock::Time::duration overslept_{};  ///< by how much its last sleeper woke late
};

}  // namespace tandem
