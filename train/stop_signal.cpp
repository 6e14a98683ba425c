#include "train/stop_signal.hpp"

#include <csignal>

namespace tandem {
namespace {

volatile std::sig_atomic_t caught = 0;

void on_signal(int number) {
  caught = number;
  std::signal(SIGINT, SIG_DFL);  // the second one is meant, whichever it is
  std::signal(SIGTERM, SIG_DFL);
}

}  // namespace

StopSignal::StopSignal() {
  caught = 0;
  std::signal(SIGINT, on_signal);
  std::signal(SIGTERM, on_signal);
}

StopSignal::~StopSignal() {
  std::signal(SIGINT, SIG_DFL);
  std::signal(SIGTERM, SIG_DFL);
}

int StopSignal::received() noexcept { return caught; }

}  // namespace tandem
