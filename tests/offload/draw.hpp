#pragma once
// Random choices of runs with delays, drawn from the number of the run.
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "tests/offload/toy/trainer.hpp"

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

/// Waits a random time in each call, a long one where that is of what is `slow`, or where all is.
inline std::function<void(std::string_view what)> drawn_delay(Draw& draw, const std::string& slow) {
  const auto random = std::make_shared<std::pair<std::mutex, std::mt19937>>();
  random->second.seed(static_cast<unsigned>(draw.below(1 << 30)));
  return [random, slow](std::string_view what) {
    const unsigned most = slow == "all" || slow == what ? 200 : 10;
    unsigned microseconds = 0;
    {
      const std::lock_guard lock(random->first);
      microseconds = static_cast<unsigned>(random->second()) % most;
    }
    if (microseconds >= 5) std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
  };
}

}  // namespace tandem::testing
