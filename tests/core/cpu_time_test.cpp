// Time that other processes take of the CPU, as the kernel counts it.
#include "core/host/cpu_time.hpp"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

namespace tandem {
namespace {

namespace fs = std::filesystem;

void work(double seconds) {
  const double begin = thread_cpu_seconds();
  while (thread_cpu_seconds() - begin < seconds) {
  }
}

/// A table of CPU time of the test's own, in ticks.
class Stat {
 public:
  explicit Stat(const std::string& text) { write(text); }
  ~Stat() { fs::remove(file_); }
  Stat(const Stat&) = delete;
  Stat& operator=(const Stat&) = delete;
  void write(const std::string& text) { std::ofstream(file_) << text << "\n"; }
  const fs::path& file() const { return file_; }

 private:
  fs::path file_ = fs::temp_directory_path() / ("tandem_stat_" + std::to_string(::getpid()));
};

TEST(OthersAtWork, CountsWhatIsNeitherIdleNorWaiting) {
  // One core of a second busy in each way that counts, nine in those that do not; guest time is in user's.
  for (const char* after :
       {"cpu  200 0 0 0 0 0 0 0 0 0", "cpu  100 100 0 0 0 0 0 0 0 0", "cpu  100 0 100 0 0 0 0 0 0 0",
        "cpu  100 0 0 0 0 100 0 0 0 0", "cpu  100 0 0 0 0 0 100 0 0 0", "cpu  100 0 0 900 900 0 0 100 100 0"}) {
    Stat stat("cpu  100 0 0 0 0 0 0 0 0 0");
    const auto begin = std::chrono::steady_clock::now();
    const OthersAtWork others(stat.file());
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    stat.write(after);
    const auto cores = others.cores();
    const std::chrono::duration<double> least(0.05), most = std::chrono::steady_clock::now() - begin;
    const double busy = 100.0 / static_cast<double>(::sysconf(_SC_CLK_TCK));
    ASSERT_TRUE(cores) << after;
    EXPECT_LE(*cores, busy / least.count()) << after;
    EXPECT_GE(*cores, (busy - most.count()) / most.count()) << after;  // less what this test itself worked
  }
}

TEST(OthersAtWork, ThisProcessIsNone) {
  Stat stat("cpu  100 0 0 0 0 0 0 0 0 0");
  const OthersAtWork others(stat.file());
  work(0.2);
  stat.write("cpu  " + std::to_string(100 + ::sysconf(_SC_CLK_TCK) / 5) + " 0 0 0 0 0 0 0 0 0");  // 0.2 s more
  EXPECT_EQ(others.cores(), 0.0);
}

TEST(OthersAtWork, AnotherProcessIs) {
  const OthersAtWork others;
  const auto begin = std::chrono::steady_clock::now();
  int done[2];
  ASSERT_EQ(::pipe(done), 0);
  const ::pid_t child = ::fork();
  ASSERT_NE(child, -1);
  if (child == 0) {
    work(0.3);
    if (::write(done[1], "", 1) == 1) ::pause();
    ::_exit(1);
  }
  char byte = 1;
  ASSERT_EQ(::read(done[0], &byte, 1), 1);
  const auto cores = others.cores();
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  ::close(done[0]);
  ::close(done[1]);
  if (!cores || *cores == 0.0) GTEST_SKIP() << "the kernel does not tell of other processes";
  EXPECT_GT(*cores * took.count(), 0.25);
}

TEST(OthersAtWork, AreUnknownWhereTheKernelDoesNotTell) {
  EXPECT_FALSE(OthersAtWork("/nonexistent").cores());
  const Stat stat("intr 1 2 3 4 5 6 7 8 9");
  EXPECT_FALSE(OthersAtWork(stat.file()).cores());
}

}  // namespace
}  // namespace tandem
