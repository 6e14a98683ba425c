// A process that has stalled is ended.
#include "train/runtime/end_stalled.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <thread>

#include "core/base/stall.hpp"
#include "tests/train/no_threads.hpp"

namespace tandem {
namespace {

using std::chrono::milliseconds;

void end_soon(const StalledError& error) { end_process_after(error, milliseconds(50)); }

TEST(EndStalled, EndsAProcessWhoseDestructorsWait) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto never_ends = [] {
    set_stall_handler(end_soon);
    std::thread stuck([] { std::this_thread::sleep_for(std::chrono::hours(1)); });
    report_stall(StalledError("copy of block 3", "it waits for the link"));
    stuck.join();
  };
  EXPECT_EXIT(never_ends(), ::testing::ExitedWithCode(5), "tandem: error: copy of block 3: it waits for the link");
}

// A line that another thread writes there may be what has stalled, and the lock is held meanwhile.
TEST(EndStalled, EndsAProcessWhoseStandardErrorTakesNothing) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "ThreadSanitizer's own _exit writes to standard error first";
#endif
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto never_ends = [] {
    ::alarm(60);  // ends the process where nothing else does
    set_stall_handler(end_soon);
    ::flockfile(stderr);
    report_stall(StalledError("copy of block 3"));
    std::this_thread::sleep_for(std::chrono::hours(1));
  };
  EXPECT_EXIT(never_ends(), ::testing::ExitedWithCode(5), "");
}

// Nobody could be told by an exception: whoever reports a stall is on the way to throw its own.
TEST(EndStalled, EndsTheProcessAtOnceWhereNoThreadCanDoItLater) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto has_no_thread = [] {
    set_stall_handler(end_soon);
    const NoThreads none;
    report_stall(StalledError("copy of block 3", "it waits for the link"));
    std::this_thread::sleep_for(std::chrono::seconds(10));
  };
  EXPECT_EXIT(has_no_thread(), ::testing::ExitedWithCode(5), "tandem: error: copy of block 3: it waits for the link");
}

TEST(EndStalled, TheHandlerIsCalledOnce) {
  static int calls = 0;
  report_stall(StalledError("nobody is told"));
  set_stall_handler([](const StalledError&) { ++calls; });
  report_stall(StalledError("one"));
  report_stall(StalledError("two"));
  set_stall_handler(nullptr);
  EXPECT_EQ(calls, 1);
}

}  // namespace
}  // namespace tandem
