// Scheduling of threads that are to wake promptly.
#include "core/base/start_thread.hpp"

#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cstdint>

namespace tandem {
namespace {

/// Time slice of the calling thread, in nanoseconds. The kernel reports it for ordinary threads from 6.12 on; 0 before.
std::uint64_t slice_of_time() {
  std::array<std::uint64_t, 6> attributes{};  // attributes of sched_attr(2), the fourth of which is the slice
  EXPECT_EQ(::syscall(SYS_sched_getattr, 0, attributes.data(), sizeof(attributes), 0), 0);
  return attributes[3];
}

TEST(WakePromptly, ShortensTheSlicesOfOneThread) {
  const std::uint64_t usual = slice_of_time();
  if (usual == 0) GTEST_SKIP() << "this kernel knows no slices of threads";
  std::uint64_t own = 0, of_a_child = 0;
  start_thread("prompt", [&] {
    wake_promptly();
    own = slice_of_time();
    start_thread("child", [&] { of_a_child = slice_of_time(); }).join();
  }).join();
  EXPECT_EQ(own, 100'000U);
  EXPECT_EQ(of_a_child, usual);
  EXPECT_EQ(slice_of_time(), usual);
}

}  // namespace
}  // namespace tandem
