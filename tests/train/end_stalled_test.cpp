#include "train/end_stalled.hpp"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "core/stall.hpp"

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
  EXPECT_EXIT(never_ends(), testing::ExitedWithCode(5), "tandem: error: copy of block 3: it waits for the link");
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
