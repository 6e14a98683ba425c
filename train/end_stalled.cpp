#include "train/end_stalled.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>
#include <string>
#include <thread>

#include "core/start_thread.hpp"

namespace tandem {

void end_process_after(const StalledError& error, std::chrono::milliseconds grace) {
  const auto end = [line = fmt::format("tandem: error: {}\n", error.what()), code = error.exit_code(), grace] {
    std::this_thread::sleep_for(grace);
    std::fputs(line.c_str(), stderr);
    std::fflush(stderr);
    ::_exit(static_cast<int>(code));  // destructors, and what they would write, wait for what has stalled
  };
  start_thread("last resort", end).detach();
}

}  // namespace tandem
