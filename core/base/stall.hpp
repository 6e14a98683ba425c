#pragma once
// Detection of stalled waits, and the process-wide handler for them. StalledError reaches whoever waited, but the
// stalled work still holds its thread, and destroying it waits for that thread.
#include <chrono>
#include <cstdint>
#include <optional>
#include <string_view>

#include "core/base/error.hpp"

namespace tandem {

/// Measures for how long nothing has moved during one wait of one thread.
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

/// Time between two looks at the progress of a watched wait.
constexpr std::chrono::milliseconds watch_tick(200);

/// "waiting for losses made no progress for 300 s: cuda:0 NVIDIA H200 does no more".
StalledError stalled(std::string_view what, double seconds, std::string_view who);

/// Handler of a stall: called once, by the first thread that gives up waiting and before StalledError reaches anybody.
/// It must return.
using StallHandler = void (*)(const StalledError& error);

/// Sets the process-wide handler, for a program that must come to an end; null, the default: none. There is one for the
/// whole process, as with std::set_terminate. Thread-safe.
void set_stall_handler(StallHandler handler) noexcept;
/// Reports a stall, for code that waits: calls the handler the first time, and does nothing from then on.
void report_stall(const StalledError& error) noexcept;

}  // namespace tandem
