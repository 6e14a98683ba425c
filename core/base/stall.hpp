#pragma once
// What becomes of a process in which something has stalled for good. StalledError tells whoever waited, but what has
// stalled still holds its thread, and destroying it waits for that thread.
#include <chrono>
#include <cstdint>
#include <optional>
#include <string_view>

#include "core/base/error.hpp"

namespace tandem {

/// Tells how long nothing has moved during one wait of one thread.
class ProgressWatch {
 public:
  /// `made`: a count of what has been done so far.
  ProgressWatch(double limit_seconds, std::uint64_t made);
  /// Seconds since `made` last changed, where they are more than the limit.
  std::optional<double> stalled(std::uint64_t made);

 private:
  double limit_;
  double since_;
  std::uint64_t seen_;
};

/// How often whoever waits looks whether something has moved.
constexpr std::chrono::milliseconds watch_tick(200);

/// "waiting for losses made no progress for 300 s: cuda:0 NVIDIA H200 does no more".
StalledError stalled(std::string_view what, double seconds, std::string_view who);

/// Called once, by the first thread that gives up waiting and before StalledError reaches anybody. It must return.
using StallHandler = void (*)(const StalledError& error);

/// For a program that must come to an end: sets its handler, or with null none, which is how a process starts. There is
/// one for the whole process, as with std::set_terminate. Thread-safe.
void set_stall_handler(StallHandler handler) noexcept;
/// For those that wait. Calls the handler the first time, and does nothing from then on.
void report_stall(const StalledError& error) noexcept;

}  // namespace tandem
