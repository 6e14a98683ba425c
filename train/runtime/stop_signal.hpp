#pragma once
// SIGINT, SIGTERM and SIGHUP (a terminal that is gone) as a request to end after the current step. A second signal ends
// the process at once.

namespace tandem {

/// Exit code of a program that a signal has ended, as in shells.
constexpr int exit_code_of(int signal) noexcept { return 128 + signal; }

class StopSignal {
 public:
  /// Catches them while it lives; SIGHUP stays ignored where it was. One at a time in a process.
  StopSignal();
  ~StopSignal();
  StopSignal(const StopSignal&) = delete;
  StopSignal& operator=(const StopSignal&) = delete;
  /// Number of the signal that came, or 0.
  static int received() noexcept;
};

}  // namespace tandem
