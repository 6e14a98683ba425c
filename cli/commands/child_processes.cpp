#include "cli/commands/child_processes.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <spdlog/spdlog.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string_view>

#include "core/base/error.hpp"
#include "train/runtime/stop_signal.hpp"

namespace tandem {
namespace {

/// Ranks learn of another's end within seconds, and end by themselves.
constexpr std::chrono::seconds patience(4);
constexpr std::size_t longest_line = 1 << 16;

[[noreturn]] void refuse(std::string_view what) {
  throw DeviceError(fmt::format("cannot start a process: {}", what), std::strerror(errno),
                    "raise the limits of processes and open files (ulimit -u, ulimit -n)");
}

/// Environment of a child: lines NAME=VALUE.
std::vector<std::string> environment_with(const std::vector<std::pair<std::string, std::string>>& changes) {
  std::vector<std::string> lines;
  for (char** line = environ; *line != nullptr; ++line) {
    const std::string_view text(*line);
    const std::string_view name = text.substr(0, text.find('='));
    if (std::ranges::none_of(changes, [&](const auto& change) { return change.first == name; }))
      lines.emplace_back(text);
  }
  for (const auto& [name, value] : changes) {
    if (!value.empty()) lines.push_back(name + "=" + value);
  }
  return lines;
}

std::vector<char*> pointers_to(std::vector<std::string>& texts) {
  std::vector<char*> pointers;
  for (std::string& text : texts) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

std::array<int, 2> make_pipe() {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) refuse("no pipe");
  return ends;
}

int code_of(int status) { return WIFSIGNALED(status) ? exit_code_of(WTERMSIG(status)) : WEXITSTATUS(status); }

}  // namespace

ChildProcesses::ChildProcesses() {
  sigset_t taken;
  sigemptyset(&taken);
  for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGCHLD}) sigaddset(&taken, number);
  ::sigprocmask(SIG_BLOCK, &taken, &before_);
  signals_ = ::signalfd(-1, &taken, SFD_CLOEXEC | SFD_NONBLOCK);
  if (signals_ < 0) refuse("no signals");
}

ChildProcesses::~ChildProcesses() {
  signal_all(SIGKILL);
  for (Child& child : children_) {
    if (child.process > 0) ::waitpid(child.process, nullptr, 0);
    for (const Output& output : child.streams) {
      if (output.fd >= 0) ::close(output.fd);
    }
  }
  ::close(signals_);
  ::sigprocmask(SIG_SETMASK, &before_, nullptr);
}

void ChildProcesses::start(const ChildCommand& command) {
  std::vector<std::string> arguments = command.arguments;
  std::vector<std::string> environment = environment_with(command.environment);
  const std::vector<char*> argv = pointers_to(arguments), envp = pointers_to(environment);
  const std::array<int, 2> out = make_pipe(), errors = make_pipe();
  const int nothing = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  const pid_t parent = ::getpid();
  const pid_t process = ::fork();
  if (process == 0) {  // nothing here that locks, or takes memory
    ::setpgid(0, 0);   // a terminal's signals reach it by this process, once
    ::prctl(PR_SET_PDEATHSIG, SIGTERM);
    ::sigprocmask(SIG_SETMASK, &before_, nullptr);
    if (::getppid() == parent && ::dup2(nothing, STDIN_FILENO) >= 0 && ::dup2(out[1], STDOUT_FILENO) >= 0 &&
        ::dup2(errors[1], STDERR_FILENO) >= 0) {
      ::execve(command.program.c_str(), argv.data(), envp.data());
    }
    ::_exit(127);
  }
  const int error = errno;
  for (const int fd : {out[1], errors[1], nothing}) ::close(fd);
  children_.push_back({process, {{out[0], stdout, {}}, {errors[0], stderr, {}}}});
  errno = error;
  if (process < 0) refuse("no process");
}

void ChildProcesses::signal_all(int number) noexcept {
  for (const Child& child : children_) {
    if (child.process > 0) ::kill(child.process, number);
  }
}

void ChildProcesses::pass_signals() {
  signalfd_siginfo info{};
  bool ended = false;
  while (::read(signals_, &info, sizeof info) == sizeof info) {
    if (info.ssi_signo == SIGCHLD) {
      ended = true;
    } else {
      is_stopping_ = true;
      signal_all(static_cast<int>(info.ssi_signo));
    }
  }
  if (ended) reap();
}

void ChildProcesses::reap() {
  for (std::size_t i = 0; i < children_.size(); ++i) {
    int status = 0;
    if (children_[i].process <= 0 || ::waitpid(children_[i].process, &status, WNOHANG) <= 0) continue;
    children_[i].process = -1;
    note_end(i, status);
  }
}

/// Ends that run() has brought about say nothing.
void ChildProcesses::note_end(std::size_t number, int status) {
  const int code = code_of(status);
  if (code == 0 || hurried_ > 0) return;
  if (WIFSIGNALED(status)) spdlog::warn("rank {} was ended by signal {}", number, WTERMSIG(status));
  const bool as_asked = is_stopping_ && WIFEXITED(status) && code > exit_code_of(0);
  if (!failed_ && !as_asked) {
    failed_ = Clock::now();
    failed_rank_ = number;
  }
  if (!first_code_) first_code_ = code;
  if (!telling_code_ && code != static_cast<int>(ExitCode::device)) telling_code_ = code;
}

/// Ends processes that have not followed one that failed, first as a user would.
void ChildProcesses::hurry() {
  if (!failed_ || Clock::now() < *failed_ + patience * (hurried_ + 1)) return;
  if (hurried_ == 0) {
    spdlog::warn("rank {} has ended with code {}, and others go on without it: they are ended", failed_rank_,
                 first_code_.value_or(0));
  }
  signal_all(hurried_ == 0 ? SIGTERM : SIGKILL);
  ++hurried_;
}

/// Prints `size` characters of what was read as a line.
void ChildProcesses::print(std::size_t number, Output& output, std::size_t size) {
  std::fputs(fmt::format("[{}] {}\n", number, std::string_view(output.line).substr(0, size)).c_str(), output.to);
  std::fflush(output.to);
}

/// Reads what is there, and prints the lines that are whole. Returns whether there may be more.
bool ChildProcesses::read(std::size_t number, Output& output) {
  std::array<char, 4096> piece{};
  const ssize_t got = ::read(output.fd, piece.data(), piece.size());
  if (got < 0 && errno == EINTR) return true;
  if (got > 0) {
    output.line.append(piece.data(), static_cast<std::size_t>(got));
    for (std::size_t end = 0; (end = output.line.find('\n')) != std::string::npos;) {
      print(number, output, end);
      output.line.erase(0, end + 1);
    }
    if (output.line.size() < longest_line) return true;
  }
  if (!output.line.empty()) print(number, output, output.line.size());
  output.line.clear();
  if (got > 0) return true;
  ::close(std::exchange(output.fd, -1));
  return false;
}

bool ChildProcesses::is_over() const {
  return std::ranges::all_of(children_, [](const Child& child) { return child.process <= 0; });
}

int ChildProcesses::run() {
  constexpr int tick = 200;  // milliseconds
  bool quiet = false;        // nobody writes any more, as far as is known
  while (!is_over() || !quiet) {
    std::vector<pollfd> waits{{signals_, POLLIN, 0}};
    std::vector<std::pair<std::size_t, Output*>> outputs;
    for (std::size_t i = 0; i < children_.size(); ++i) {
      for (Output& output : children_[i].streams) {
        if (output.fd < 0) continue;
        waits.push_back({output.fd, POLLIN, 0});
        outputs.emplace_back(i, &output);
      }
    }
    const int ready = ::poll(waits.data(), waits.size(), is_over() ? 0 : tick);
    quiet = ready <= 0;
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      if (waits[i + 1].revents != 0) static_cast<void>(read(outputs[i].first, *outputs[i].second));
    }
    pass_signals();
    hurry();
  }
  return telling_code_.value_or(first_code_.value_or(0));
}

}  // namespace tandem
