#include "scheduler/tasks/ready_queue.hpp"

namespace tandem {

/// Puts a key in its place.
void ReadyQueue::insert(std::int64_t key) {
  if (!empty() && key < keys_[keys_.begin()]) {
    keys_.push_front() = key;
    return;
  }
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
std::int64_t ReadyQueue::place_of(std::int64_t key) const noexcept {
  std::int64_t low = keys_.begin();
  for (std::int64_t high = keys_.end(); low < high;) {
    const std::int64_t middle = low + (high - low) / 2;
    if (keys_[middle] < key) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace tandem
