// A mutex of one instruction: that it excludes, and that who waits for it wakes.
#include "core/base/brief_mutex.hpp"

#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace tandem {
namespace {

TEST(BriefMutex, ExcludesThreadsThatSleepWithIt) {
  constexpr int threads = 4, rounds = 4000;
  BriefMutex mutex;
  std::int64_t count = 0;  // no atomic: two threads at once would lose some, and a sanitizer would see them
  std::vector<std::thread> all;
  for (int t = 0; t < threads; ++t) {
    all.emplace_back([&, t] {
      for (int i = 0; i < rounds; ++i) {
        const std::lock_guard lock(mutex);
        const std::int64_t before = count;
        if ((i + t) % 64 == 0) std::this_thread::sleep_for(std::chrono::microseconds(20));  // the others come to sleep
        count = before + 1;
      }
    });
  }
  for (std::thread& thread : all) thread.join();
  EXPECT_EQ(count, threads * rounds);
}

TEST(BriefMutex, WakesEachOfThoseWhoSleepForIt) {
  constexpr int threads = 3;
  BriefMutex mutex;
  std::unique_lock lock(mutex);
  int passed = 0;
  std::vector<std::thread> all;
  for (int t = 0; t < threads; ++t) {
    all.emplace_back([&] {
      const std::lock_guard own(mutex);
      ++passed;
    });
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(50));  // they sleep, all for one word
  EXPECT_EQ(passed, 0);
  lock.unlock();
  for (std::thread& thread : all) thread.join();  // forever, where a wake-up is lost
  EXPECT_EQ(passed, threads);
}

TEST(BriefMutex, GoesWithAConditionVariable) {
  constexpr int turns = 2000;
  BriefMutex mutex;
  std::condition_variable_any changed;
  int turn = 0;
  const auto play = [&](int own) {
    std::unique_lock lock(mutex);
    for (int i = 0; i < turns; ++i) {
      changed.wait(lock, [&] { return turn % 2 == own; });
      ++turn;
      changed.notify_one();
    }
  };
  std::thread other([&] { play(1); });
  play(0);
  other.join();
  EXPECT_EQ(turn, 2 * turns);
}

}  // namespace
}  // namespace tandem
