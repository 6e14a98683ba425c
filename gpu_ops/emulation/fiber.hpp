#pragma once
// A function on a stack of its own, over Boost.Context. AddressSanitizer and ThreadSanitizer are told of every
// switch where they are part of the program.
#include <cstddef>
#include <functional>
#include <memory>

namespace tandem::emulation {

/// Runs one job after the other, each in pieces: `resume` starts or continues it, `suspend`, called from
/// within, returns to who resumed. Belongs to the thread that made it.
class Fiber {
 public:
  explicit Fiber(std::size_t stack_bytes);
  /// The last job must have ended.
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  /// The job of the next `resume`. It must not throw. The last one must have ended.
  void start(std::function<void()> job);
  /// Runs the job until it suspends or ends; whether it has ended.
  bool resume();
  /// Called on this fiber's stack only.
  void suspend();

 private:
  struct Switch;
  std::unique_ptr<Switch> switch_;
};

}  // namespace tandem::emulation
