#pragma once
// Processes that work together and end together: their lines pass through, signals reach all.
#include <sys/types.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace tandem {

struct ChildCommand {
  std::filesystem::path program;
  std::vector<std::string> arguments;                            ///< the name by which it is called first
  std::vector<std::pair<std::string, std::string>> environment;  ///< beside that of this process; an empty value: unset
};

/// One at a time in a process, which has no other threads and catches no signals of its own meanwhile.
class ChildProcesses {
 public:
  /// Makes SIGINT, SIGTERM and SIGHUP wait for run() from here on.
  ChildProcesses();
  /// Kills those that are left.
  ~ChildProcesses();
  ChildProcesses(const ChildProcesses&) = delete;
  ChildProcesses& operator=(const ChildProcesses&) = delete;

  /// Starts one more, whose lines begin with its number. It ends with this process, by SIGTERM. Throws DeviceError
  /// where the system has no room for it.
  void start(const ChildCommand& command);
  /// Passes on lines and signals until all have ended. When one has failed and the others do not follow by themselves
  /// in four seconds, they are ended. Returns the exit code of the first that failed, of one that was ended by signal n
  /// 128 + n; a 5 counts where there is no other, since with it ranks tell that another has failed. Blocks.
  int run();

 private:
  using Clock = std::chrono::steady_clock;
  /// One of the streams that a child writes.
  struct Output {
    int fd = -1;  ///< -1: closed
    std::FILE* to = nullptr;
    std::string line;  ///< begun, not ended
  };
  struct Child {
    pid_t process = -1;  ///< -1: it has ended
    Output streams[2];
  };

  void pass_signals();
  void reap();
  void note_end(std::size_t number, int status);
  void hurry();
  void signal_all(int number) noexcept;
  bool read(std::size_t number, Output& output);
  static void print(std::size_t number, Output& output, std::size_t size);
  bool is_over() const;

  sigset_t before_{};  ///< signals that were blocked before
  int signals_ = -1;
  std::vector<Child> children_;
  std::optional<int> first_code_;    ///< code of the first that failed
  std::optional<int> telling_code_;  ///< the first code that says more than that another has failed
  std::optional<Clock::time_point> failed_;
  std::size_t failed_rank_ = 0;  ///< the first that failed
  bool is_stopping_ = false;     ///< a signal has been passed on
  int hurried_ = 0;              ///< how often those that did not follow were told to end
};

}  // namespace tandem
