// Processes that are killed or stand still are named to all others within seconds.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "tests/comm/group_testing.hpp"
#include "tests/comm/processes/launch.hpp"

namespace tandem {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

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
    EXPECT_EQ(::write(ends_[1], text.data(), text.size()), ::ssize_t(text.size()));
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

/// Three ranks, each a process of its own that waits in a meeting to which one of them does not come. A rank's pipe has
/// a line when it has started and one with what it was told. Rank 0 tells its port by a pipe.
class RanksInProcesses {
 public:
  RanksInProcesses(int absent, double silence_seconds) {
    for (int rank = 0; rank < 3; ++rank) {
      const pid_t child = ::fork();
      if (child == 0) run(rank, absent, silence_seconds);
      pids_.push_back(child);
      if (rank == 0) port_ = std::stoi(ports_.line());
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
  std::string told(int rank) { return pipes_[static_cast<std::size_t>(rank)].line(); }

 private:
  [[noreturn]] void run(int rank, int absent, double silence_seconds) {
    Pipe& pipe = pipes_[static_cast<std::size_t>(rank)];
    RendezvousOptions options = testing::options_for(rank, 3);
    options.port = port_;
    options.silence_seconds = silence_seconds;
    options.listening = [this](int port) { ports_.write(std::to_string(port) + "\n"); };
    try {
      Rendezvous rendezvous(options);
      pipe.write("started\n");
      while (rank == absent && !rendezvous.failure()) std::this_thread::sleep_for(1ms);
      rendezvous.meet(0, "values", "");
    } catch (const std::exception& error) {
      pipe.write(std::string(error.what()) + "\n");
    }
    ::_exit(0);
  }

  Pipe ports_;
  std::array<Pipe, 3> pipes_;
  std::vector<pid_t> pids_;
  int port_ = 0;
};

class AKilledRank : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Number, AKilledRank, ::testing::Values(0, 1, 2),
                         [](const auto& each) { return std::to_string(each.param); });

TEST_P(AKilledRank, IsNamedToTheOthersAtOnce) {
  RanksInProcesses ranks(GetParam(), 30.0);
  const auto begin = std::chrono::steady_clock::now();
  ranks.signal(GetParam(), SIGKILL);
  for (int rank = 0; rank < 3; ++rank) {
    if (rank == GetParam()) continue;
    EXPECT_THAT(ranks.told(rank), AllOf(StartsWith("rank " + std::to_string(GetParam()) + " at "),
                                        HasSubstr(" is lost: its connection ended")));
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 5s);
}

class AStoppedRank : public AKilledRank {};
INSTANTIATE_TEST_SUITE_P(Number, AStoppedRank, ::testing::Values(0, 2),
                         [](const auto& each) { return std::to_string(each.param); });

TEST_P(AStoppedRank, IsNamedToAllAndToldWhenItGoesOn) {
  RanksInProcesses ranks(GetParam(), 1.0);
  const auto begin = std::chrono::steady_clock::now();
  ranks.signal(GetParam(), SIGSTOP);
  const std::string lost = "rank " + std::to_string(GetParam()) + " at ";
  for (int rank = 0; rank < 3; ++rank) {
    if (rank == GetParam()) continue;
    EXPECT_THAT(ranks.told(rank), AllOf(StartsWith(lost), HasSubstr(" is lost: no sign of life for 1 s")));
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 8s);
  ranks.signal(GetParam(), SIGCONT);
  // Rank 0 alone kept the group: to it the others are gone.
  EXPECT_THAT(ranks.told(GetParam()), HasSubstr(GetParam() == 0 ? "is lost: " : lost));
}

}  // namespace
}  // namespace tandem
