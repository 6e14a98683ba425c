#include "train/stop_signal.hpp"

#include <csignal>

namespace tandem {
namespace {

volatile std::sig_atomic_t caught = 0;

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
  caught = number;
  handle_signals_by(SIG_DFL);  // the second one is meant, whichever it is
}

}  // namespace

StopSignal::StopSignal() {
  caught = 0;
  handle_signals_by(on_signal);
}

StopSignal::~StopSignal() { handle_signals_by(SIG_DFL); }

int StopSignal::received() noexcept { return caught; }

}  // namespace tandem
