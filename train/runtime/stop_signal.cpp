#include "train/runtime/stop_signal.hpp"

#include <atomic>
#include <cerrno>
#include <csignal>

namespace tandem {
namespace {

/// Whichever thread takes the signal, others ask for it.
std::atomic<int> caught = 0;
static_assert(std::atomic<int>::is_always_lock_free, "or else a signal handler must not touch it");

constexpr int signals[] = {SIGINT, SIGTERM, SIGHUP};

/// A hangup that is ignored stays so: under nohup the terminal may go.
void handle_signals_by(void (*handler)(int)) {
  for (const int number : signals) {
    struct sigaction present = {};
    sigaction(number, nullptr, &present);
    if (number == SIGHUP && present.sa_handler == SIG_IGN) continue;
    std::signal(number, handler);
  }
}

void on_signal(int number) {
  const int before = errno;  // errno of the interrupted code
  caught = number;
  handle_signals_by(SIG_DFL);  // the second one is meant, whichever it is
  errno = before;
}

}  // namespace

StopSignal::StopSignal() {
  caught = 0;
  handle_signals_by(on_signal);
}

StopSignal::~StopSignal() { handle_signals_by(SIG_DFL); }

int StopSignal::received() noexcept { return caught; }

}  // namespace tandem
