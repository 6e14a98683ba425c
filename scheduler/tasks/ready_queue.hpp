#pragma once
// Tasks of a lane that may run, the most urgent first.
#include <cstdint>

#include "scheduler/tasks/ring.hpp"
#include "scheduler/tasks/task.hpp"

namespace tandem {

/// Sorted by priority, then id, in a ring. Tasks get ready nearly in the order in which they are to run, or, released by
/// one that all have waited for, in the reverse: most come last or first. The rest move few: of those before and those
/// behind its place the fewer. Allocates nothing once it has been as long as it gets.
class ReadyQueue {
 public:
  bool empty() const noexcept { return keys_.empty(); }
  /// There must be one.
  TaskId first() const noexcept { return TaskId(keys_[keys_.begin()] & most_ids); }
  /// `priority`: 0 to 2^19 - 1; `id` below 2^44.
  void push(std::int64_t priority, TaskId id) {
    const std::int64_t key = priority << id_bits | id.number();
    const bool at_end = empty() || keys_[keys_.end() - 1] < key;
    if (!at_end || keys_.full()) return insert(key);
    keys_.push() = key;
  }
  void pop() noexcept { keys_.pop_before(keys_.begin() + 1); }
  void clear() noexcept { keys_.restart(); }

 private:
  static constexpr int id_bits = 44;
  static constexpr std::int64_t most_ids = (std::int64_t{1} << id_bits) - 1;

  void insert(std::int64_t key);
  std::int64_t place_of(std::int64_t key) const noexcept;

  Ring<std::int64_t> keys_;  ///< priority above, id below: one comparison
};

}  // namespace tandem
