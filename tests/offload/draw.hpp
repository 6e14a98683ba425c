#pragma once
// What runs with delays draw from their numbers.
#include <cstddef>
#include <cstdlib>
#include <random>

namespace tandem::testing {

/// TANDEM_DELAYED_RUNS, and `otherwise` where it is not set.
inline int delayed_runs(int otherwise) {
  const char* const text = std::getenv("TANDEM_DELAYED_RUNS");
  return text == nullptr ? otherwise : std::atoi(text);
}

class Draw {
 public:
  explicit Draw(unsigned seed) : random_(seed) {}
  /// 0 ... count - 1
  int below(int count) { return static_cast<int>(random_() % static_cast<unsigned>(count)); }
  bool one_in(int count) { return below(count) == 0; }
  template <class Choices>
  auto of(const Choices& choices) {
    return choices[static_cast<std::size_t>(below(static_cast<int>(choices.size())))];
  }

 private:
  std::mt19937 random_;
};

}  // namespace tandem::testing
