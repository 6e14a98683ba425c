#pragma once
// How fast a checkpoint goes to the disk while training goes on.
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>

#include "io/file_ops.hpp"

namespace tandem {

/// The time that a pace goes by; tests give one of their own.
struct PaceClock {
  std::function<double()> now;  ///< seconds
  /// Returns then, or when notified, or sooner.
  std::function<void(std::condition_variable& changed, std::unique_lock<std::mutex>& lock, double until)> wait;
  static PaceClock real();
};

/// Seconds between one save and the time when the next one wants this one out of its way.
struct SaveInterval {
  std::int64_t steps = 0;
  double step_seconds = 0.0;
  /// Share of it that is left free: a step may turn out to be shorter than those before it.
  static constexpr double spare = 0.2;
  double usable() const noexcept { return (1.0 - spare) * static_cast<double>(steps) * step_seconds; }
};

/// Writing takes cores and memory from steps, the less of a step the longer a save takes. So after each piece the disk
/// rests, and writes for `busy_share` of the time; less rest where the save would else last into the last fifth of
/// the steps that are left before the next one, and none where even that is late. Thread-safe.
class SavePace {
 public:
  static constexpr double busy_share = 0.25;

  /// `urgent`, asked after each piece: whether nobody trains much longer. May be empty.
  explicit SavePace(std::function<bool()> urgent = {}, PaceClock clock = PaceClock::real());

  /// Begins a save of `bytes`, beside so many steps of about so long.
  void begin(std::uint64_t bytes, SaveInterval interval);
  /// A step has ended, that took so long.
  void note_step(double seconds);
  /// Somebody waits for the save: no more rests, and one that goes on ends at once.
  void hurry();
  /// A piece has been written, in so many seconds. Blocks for the rest that follows it.
  void wrote(std::size_t bytes, double seconds);

  /// Seconds on the clock that `wrote` goes by.
  double now() const { return clock_.now(); }
  /// Bytes a second since `begin`, rests left out; 0: nothing written.
  double disk() const;

  /// Seconds that a save takes beside steps, where it takes `alone` without them.
  static double seconds_beside(double alone, double usable) noexcept;

 private:
  double rest_after(std::size_t bytes, double seconds, double end) const;
  void aim();

  const std::function<bool()> urgent_;
  const PaceClock clock_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  SaveInterval interval_;
  std::int64_t steps_left_ = 0;
  double due_ = 0.0;  ///< when all is to be written
  bool hurried_ = false;
  std::uint64_t bytes_left_ = 0;
  double bytes_written_ = 0.0;
  double busy_seconds_ = 0.0;
};

/// The system's files, written at a pace, which must outlive them.
class PacedFiles final : public FileOps {
 public:
  explicit PacedFiles(SavePace& pace) : pace_(pace) {}
  int write(int fd, const void* data, std::size_t bytes, std::size_t& written) override;

 private:
  SavePace& pace_;
};

}  // namespace tandem
