#include "train/stop_signal.hpp"

#include <csignal>

namespace tandem {
namespace {

volatile std::sig_atomic_t caught = 0;

constexpr int signals[] = {SIGINT, SIGTERM, SIGHUP};

void let_signals_end_the_process() {
  for (const int number : signals) std::signal(number, SIG_DFL);
}

void on_signal(int number) {
  caught = number;
  let_signals_end_the_process();  // the second one is meant, whichever it is
}

}  // namespace

StopSignal::StopSignal() {
  caught = 0;
  for (const int number : signals) {
    const bool ignored = std::signal(number, on_signal) == SIG_IGN;
    if (ignored && number == SIGHUP) std::signal(number, SIG_IGN);  // nohup: the terminal may go
  }
}

StopSignal::~StopSignal() { let_signals_end_the_process(); }

int StopSignal::received() noexcept { return caught; }

}  // namespace tandem
