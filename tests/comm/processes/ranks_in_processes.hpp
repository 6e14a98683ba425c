#pragma once
// Ranks that are processes, to be killed and stopped.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <deque>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/comm/processes/launch.hpp"

namespace tandem::testing {

/// A pipe of which both ends are closed with it.
class Pipe {
 public:
  Pipe() {
    if (::pipe(ends_.data()) != 0) throw std::runtime_error("no pipe");
  }
  ~Pipe() {
    close_writer();
    ::close(ends_[0]);
  }
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;
  void write(const std::string& text) {
    EXPECT_EQ(::write(ends_[1], text.data(), text.size()), static_cast<ssize_t>(text.size()));
  }
  void close_writer() {
    if (ends_[1] >= 0) ::close(ends_[1]);
    ends_[1] = -1;
  }
  /// Blocks until there is a line, or no process has it open for writing; what there is without its end.
  std::string line() {
    std::string text;
    char c = 0;
    while (::read(ends_[0], &c, 1) == 1 && c != '\n') text += c;
    return text;
  }

 private:
  std::array<int, 2> ends_{-1, -1};
};

/// Each rank joins the others, with the options of `change`, and calls `body`. To be made while this process has one
/// thread: the ranks are forks of it. Killed at the end.
class RanksInProcesses {
 public:
  /// Calls `started` once the rank is about to do what the test is about.
  using Body = std::function<void(std::unique_ptr<Rendezvous>, const std::function<void()>& started)>;

  /// Blocks until all have started.
  RanksInProcesses(int count, const Change& change, const Body& body) : pipes_(static_cast<std::size_t>(count)) {
    int port = 0;
    for (int rank = 0; rank < count; ++rank) {
      const pid_t child = ::fork();
      if (child == 0) run({rank, count}, port, change, body);
      pids_.push_back(child);
      if (rank == 0) port = std::stoi(ports_.line());
    }
    for (Pipe& pipe : pipes_) {
      pipe.close_writer();
      EXPECT_EQ(pipe.line(), "started");
    }
  }
  ~RanksInProcesses() {
    for (const pid_t pid : pids_) {
      ::kill(pid, SIGKILL);
      ::waitpid(pid, nullptr, 0);
    }
  }
  RanksInProcesses(const RanksInProcesses&) = delete;
  RanksInProcesses& operator=(const RanksInProcesses&) = delete;

  void signal(int rank, int number) { ::kill(pids_[static_cast<std::size_t>(rank)], number); }
  /// The error that the rank's body has thrown, in a line; empty where it has thrown nothing or the process was killed.
  /// Blocks.
  std::string told(int rank) { return pipes_[static_cast<std::size_t>(rank)].line(); }

 private:
  [[noreturn]] void run(Rank rank, int port, const Change& change, const Body& body) {
    Pipe& pipe = pipes_[static_cast<std::size_t>(rank.index)];
    RendezvousOptions options = options_for(rank.index, rank.count);
    options.port = port;
    options.listening = [this](int bound) { ports_.write(std::to_string(bound) + "\n"); };
    if (change) change(options);
    try {
      body(std::make_unique<Rendezvous>(options), [&] { pipe.write("started\n"); });
    } catch (const std::exception& error) {
      pipe.write(std::string(error.what()) + "\n");
    }
    ::_exit(0);
  }

  Pipe ports_;
  std::deque<Pipe> pipes_;
  std::vector<pid_t> pids_;
};

}  // namespace tandem::testing
