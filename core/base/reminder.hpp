#pragma once
// When a wait that goes on says so: soon, and then ever less often.
#include <algorithm>

namespace tandem {

/// Seconds on any clock. The gaps between two words double, up to a minute.
class Reminder {
 public:
  /// `first`: seconds after `began` until the wait speaks for the first time.
  Reminder(double began, double first) noexcept : next_(began + first), gap_(first) {}

  /// Whether it is time for a word now; true once for each.
  bool due(double now) noexcept {
    if (now < next_) return false;
    gap_ = std::min(2.0 * gap_, longest);
    next_ = now + gap_;
    return true;
  }

 private:
  static constexpr double longest = 60.0;

  double next_;
  double gap_;
};

}  // namespace tandem
