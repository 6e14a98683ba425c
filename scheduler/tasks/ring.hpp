#pragma once
// A queue that allocates nothing once it has been as long as it gets.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace tandem {

/// A queue in one block of memory. An element is found by its number: how many were pushed before it, counted
/// from `first`. References hold until the next push. `Number`: std::int64_t, or an Index of that.
template <class T, class Number = std::int64_t>
class Ring {
 public:
  explicit Ring(Number first = Number(0)) : begin_(first), end_(first) {}

  Number begin() const noexcept { return begin_; }
  Number end() const noexcept { return end_; }
  bool empty() const noexcept { return begin_ == end_; }
  /// Whether the next push allocates.
  bool full() const noexcept { return end_ - begin_ > mask_; }
  bool holds(Number number) const noexcept { return number >= begin_ && number < end_; }
  T& operator[](Number number) noexcept { return slots_[slot(number)]; }
  const T& operator[](Number number) const noexcept { return slots_[slot(number)]; }

  T& push(T element) { return push() = std::move(element); }
  /// The new last element, as whoever had its slot left it.
  T& push() {
    if (full()) grow();
    return slots_[slot(end_++)];
  }
  /// The new first element, likewise: its number is the one below those of all others.
  T& push_front() {
    if (full()) grow();
    return slots_[slot(--begin_)];
  }
  /// Removes what comes before `number`. The elements are not destroyed: later pushes take their slots.
  void pop_before(Number number) noexcept { begin_ = number; }
  /// Empties the ring, and keeps its memory.
  void restart(Number first = Number(0)) noexcept { begin_ = end_ = first; }

 private:
  /// The number of slots is a power of two, so that those in use stay apart.
  std::size_t slot(Number number) const noexcept { return static_cast<std::size_t>((number - Number(0)) & mask_); }
  /// Out of line: its registers would cost every push.
  [[gnu::noinline]] void grow() {
    constexpr std::int64_t at_first = 64;
    const std::int64_t slots = std::max(at_first, 2 * (mask_ + 1));
    Ring larger(begin_);
    larger.mask_ = slots - 1;
    larger.slots_.resize(static_cast<std::size_t>(slots));
    for (; larger.end_ < end_; ++larger.end_) larger[larger.end_] = std::move((*this)[larger.end_]);
    *this = std::move(larger);
  }

  std::vector<T> slots_;
  std::int64_t mask_ = -1;  ///< number of slots, which the vector would have to divide for, less one
  Number begin_;
  Number end_;
};

}  // namespace tandem
