#pragma once
// Tasks of a lane that may run, the most urgent first.
#include <algorithm>
#include <cstdint>

#include "scheduler/tasks/ring.hpp"
#include "scheduler/tasks/task.hpp"

namespace tandem {

/// Sorted by priority, then id, in a ring. Tasks get ready nearly in the order in which they are to run, so that most
/// are appended, and the rest move few: of those before and those behind its place the fewer. Allocates nothing once it
/// has been as long as it gets.
class ReadyQueue {
 public:
  bool empty() const noexcept { return keys_.empty(); }
  /// There must be one.
  TaskId first() const noexcept { return keys_[keys_.begin()] & most_ids; }
  /// `priority`: 0 to 2^19 - 1; `id` below 2^44.
  void push(std::int64_t priority, TaskId id) {
    const std::int64_t key = priority << id_bits | id;
    if (empty() || keys_[keys_.end() - 1] < key) {
      keys_.push() = key;
    } else {
      insert(key);
    }
  }
  void pop() noexcept { keys_.pop_before(keys_.begin() + 1); }
  void clear() noexcept { keys_.restart(); }

 private:
  static constexpr int id_bits = 44;
  static constexpr TaskId most_ids = (TaskId{1} << id_bits) - 1;

  void insert(std::int64_t key) {
    const std::int64_t at = place_of(key);
    if (at - keys_.begin() < keys_.end() - at) {
      keys_.push_front();
      for (std::int64_t i = keys_.begin(); i < at - 1; ++i) keys_[i] = keys_[i + 1];
      keys_[at - 1] = key;
    } else {
      keys_.push();
      for (std::int64_t i = keys_.end() - 1; i > at; --i) keys_[i] = keys_[i - 1];
      keys_[at] = key;
    }
  }
  /// Number of the first key above this one.
  std::int64_t place_of(std::int64_t key) const noexcept {
    std::int64_t low = keys_.begin();
    for (std::int64_t high = keys_.end(); low < high;) {
      const std::int64_t middle = low + (high - low) / 2;
      (keys_[middle] < key ? low : high) = keys_[middle] < key ? middle + 1 : middle;
    }
    return low;
  }

  Ring<std::int64_t> keys_;  ///< priority above, id below: one comparison
};

}  // namespace tandem
