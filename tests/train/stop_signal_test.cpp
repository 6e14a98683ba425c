// Signals that ask a run to stop.
#include "train/runtime/stop_signal.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <thread>

namespace tandem {
namespace {

TEST(StopSignal, IsSeenByEveryThreadWhicheverTookIt) {
  for (const int number : {SIGINT, SIGTERM, SIGHUP}) {
    const StopSignal stop;
    std::atomic<int> seen = 0;
    std::thread other([&] {
      while (seen == 0) seen = StopSignal::received();
    });
    kill(getpid(), number);
    other.join();
    EXPECT_EQ(seen, number);
  }
}

TEST(StopSignal, OfOneBeforeNothingIsLeft) {
  {
    const StopSignal stop;
    std::raise(SIGINT);
    EXPECT_EQ(StopSignal::received(), SIGINT);
  }
  const StopSignal stop;
  EXPECT_EQ(StopSignal::received(), 0);
}

TEST(StopSignal, LeavesErrnoToWhatItInterrupts) {
  const StopSignal stop;
  errno = ENOSPC;
  std::raise(SIGTERM);
  EXPECT_EQ(errno, ENOSPC);
}

TEST(StopSignal, TheSecondEndsTheProcessWhicheverItIs) {
  for (const int second : {SIGINT, SIGTERM, SIGHUP}) {
    EXPECT_EXIT(
        {
          const StopSignal stop;
          std::raise(SIGTERM);
          std::raise(second);
        },
        ::testing::KilledBySignal(second), "");
  }
}

TEST(StopSignal, AHangupThatIsIgnoredStaysSo) {
  const auto before = std::signal(SIGHUP, SIG_IGN);
  {
    const StopSignal stop;
    std::raise(SIGHUP);
    EXPECT_EQ(StopSignal::received(), 0);
    std::raise(SIGINT);
    std::raise(SIGHUP);
  }
  std::raise(SIGHUP);
  std::signal(SIGHUP, before);
}

}  // namespace
}  // namespace tandem
