#include "train/runtime/end_stalled.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>
#include <string>
#include <thread>

#include "core/base/start_thread.hpp"

namespace tandem {
namespace {

// For the last line to be taken: standard error may be on what has stalled, or held by a thread that writes to it.
constexpr std::chrono::seconds patience(2);

[[noreturn]] void end(ExitCode code) {
  ::_exit(static_cast<int>(code));  // destructors, and what they would write, wait for what has stalled
}

void say(const std::string& line) {
  std::fputs(line.c_str(), stderr);
  std::fflush(stderr);
}

}  // namespace

void end_process_after(const StalledError& error, std::chrono::milliseconds grace) {
  const std::string line = fmt::format("tandem: error: {}\n", error.what());
  const ExitCode code = error.exit_code();
  try {
    const auto wait_and_end = [code, grace] {
      std::this_thread::sleep_for(grace + patience);
      end(code);
    };
    const auto wait_say_and_end = [line, code, grace] {
      std::this_thread::sleep_for(grace);
      say(line);
      end(code);
    };
    start_thread("last resort", wait_and_end).detach();
    start_thread("last words", wait_say_and_end).detach();
  } catch (const DeviceError&) {  // nobody would end it later
    say(line);
    end(code);
  }
}

}  // namespace tandem
