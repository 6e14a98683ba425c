#pragma once
// A mutex for what takes less time than a call of the system's.
#include <atomic>
#include <cstdint>

namespace tandem {

/// A mutex whose critical sections are short and seldom wanted by two threads at once: then it is taken and given back
/// inline, by one instruction each, where std::mutex takes forty in the C library. Who has to wait sleeps. For
/// std::unique_lock, and std::condition_variable_any. Not recursive, not fair.
class BriefMutex {
 public:
  BriefMutex() = default;
  BriefMutex(const BriefMutex&) = delete;
  BriefMutex& operator=(const BriefMutex&) = delete;

  /// Blocks until it is free.
  void lock() noexcept {
    if (!try_lock()) wait();
  }
  /// Whether it was free, and is taken now. Does not block.
  bool try_lock() noexcept {
    std::uint32_t expected = is_free;
    return state_.compare_exchange_strong(expected, is_held, std::memory_order_acquire, std::memory_order_relaxed);
  }
  /// Does not block. Only by the thread that has locked it.
  void unlock() noexcept {
    if (state_.exchange(is_free, std::memory_order_release) == is_wanted) state_.notify_one();
  }

 private:
  static constexpr std::uint32_t is_free = 0, is_held = 1;
  static constexpr std::uint32_t is_wanted = 2;  ///< held, and others may sleep

  /// Looks again for about as long as a critical section takes, then sleeps: whoever unlocks what is wanted makes a
  /// call of the system. Who has slept leaves it as wanted: there may be more.
  [[gnu::noinline]] void wait() noexcept {
    constexpr int looks = 400;
    for (int i = 0; i < looks; ++i) {
      if (state_.load(std::memory_order_relaxed) == is_free && try_lock()) return;
    }
    while (state_.exchange(is_wanted, std::memory_order_acquire) != is_free) {
      state_.wait(is_wanted, std::memory_order_relaxed);
    }
  }

  std::atomic<std::uint32_t> state_{is_free};
};

}  // namespace tandem
