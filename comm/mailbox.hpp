#pragma once
// News of its group for one rank: the start, the meetings that are complete, the end. One thread delivers, others
// wait.
#include <condition_variable>
#include <cstddef>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/wire.hpp"

namespace tandem {

/// Thread-safe. The first end is kept, and thrown to whoever waits, then and later.
class Mailbox {
 public:
  Mailbox(int rank, std::size_t meetings) : rank_(rank), meetings_(meetings) {}

  /// Takes a message of rank 0's.
  void deliver(const Message& message);
  /// Ends the group for this rank.
  void end(std::exception_ptr failure) noexcept;

  /// Blocks until the group has started. Throws what has ended it.
  void wait_for_start();
  /// Begins to wait for a meeting. Throws what has ended the group, MisuseError where this rank is in that meeting.
  void begin(std::size_t meeting, std::string_view call);
  /// Blocks until the meeting that was begun is complete. Returns the values by rank.
  std::vector<std::string> wait_for(std::size_t meeting);

  std::exception_ptr failure() const;
  /// Calls `stop` once when the group ends otherwise than by a rank that leaves it; at once where it has. On the thread
  /// that delivers; `stop` must be short and must not throw. Null: nothing is called from then on.
  void when_broken(std::function<void()> stop);

 private:
  struct Meeting {
    bool waited_for = false;
    std::optional<std::vector<std::string>> values;
  };

  const int rank_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool started_ = false;
  bool broken_ = false;
  std::exception_ptr failure_;
  std::vector<Meeting> meetings_;
  std::function<void()> stop_;
};

}  // namespace tandem
