#include "gpu_ops/emulation/fiber.hpp"

#include <boost/context/fiber.hpp>
#include <boost/context/preallocated.hpp>
#include <utility>

// Found in the program where it was built with the sanitizer, null elsewhere.
// NOLINTBEGIN(bugprone-reserved-identifier, readability-identifier-naming): names of the sanitizers'
extern "C" {
[[gnu::weak]] void __sanitizer_start_switch_fiber(void** fake_stack, const void* bottom, std::size_t bytes);
[[gnu::weak]] void __sanitizer_finish_switch_fiber(void* fake_stack, const void** bottom, std::size_t* bytes);
[[gnu::weak]] void* __tsan_get_current_fiber();
[[gnu::weak]] void* __tsan_create_fiber(unsigned flags);
[[gnu::weak]] void __tsan_destroy_fiber(void* fiber);
[[gnu::weak]] void __tsan_switch_to_fiber(void* fiber, unsigned flags);
}
// NOLINTEND(bugprone-reserved-identifier, readability-identifier-naming)

namespace tandem::emulation {
namespace {

/// The stack belongs to the Fiber.
struct KeptStack {
  void deallocate(boost::context::stack_context&) noexcept {}
};

/// One of the two stacks between which a fiber switches, as the sanitizers know it.
struct Side {
  const void* bottom = nullptr;
  std::size_t bytes = 0;
  void* fake_stack = nullptr;  ///< AddressSanitizer's, kept while the other side runs
  void* tsan = nullptr;
};

void leave(Side& from, const Side& to, bool for_good) {
  if (__sanitizer_start_switch_fiber != nullptr) {
    __sanitizer_start_switch_fiber(for_good ? nullptr : &from.fake_stack, to.bottom, to.bytes);
  }
  // Nothing is ordered by a switch: what is ordered, the grid says.
  constexpr unsigned no_sync = 1;
  if (__tsan_switch_to_fiber != nullptr) __tsan_switch_to_fiber(to.tsan, no_sync);
}

void arrive(Side& here, Side& other) {
  if (__sanitizer_finish_switch_fiber == nullptr) return;
  __sanitizer_finish_switch_fiber(here.fake_stack, &other.bottom, &other.bytes);
}

}  // namespace

struct Fiber::Switch {
  explicit Switch(std::size_t stack_bytes)
      : stack(std::make_unique_for_overwrite<std::byte[]>(stack_bytes)),
        inside{.bottom = stack.get(), .bytes = stack_bytes} {
    if (__tsan_create_fiber != nullptr) inside.tsan = __tsan_create_fiber(0);
    boost::context::stack_context context;
    context.size = stack_bytes;
    context.sp = stack.get() + stack_bytes;
    boost::context::preallocated memory(context.sp, context.size, context);
    fiber = boost::context::fiber(std::allocator_arg, memory, KeptStack(),
                                  [this](boost::context::fiber&& caller) { return serve(std::move(caller)); });
  }

  /// The fiber's whole life: jobs until it is told to end.
  boost::context::fiber serve(boost::context::fiber&& caller) {
    other = std::move(caller);
    arrive(inside, outside);
    while (!ending) {
      job();
      job = nullptr;
      done = true;
      suspend();
    }
    leave(inside, outside, true);
    return std::move(other);
  }

  void suspend() {
    leave(inside, outside, false);
    other = std::move(other).resume();
    arrive(inside, outside);
  }

  void resume() {
    if (__tsan_get_current_fiber != nullptr) outside.tsan = __tsan_get_current_fiber();
    leave(outside, inside, false);
    fiber = std::move(fiber).resume();
    Side unused;
    arrive(outside, unused);
  }

  std::unique_ptr<std::byte[]> stack;
  Side inside, outside;
  boost::context::fiber fiber;  ///< the suspended inside, seen from outside
  boost::context::fiber other;  ///< the suspended outside, seen from inside
  std::function<void()> job;
  bool done = true;
  bool ending = false;
};

Fiber::Fiber(std::size_t stack_bytes) : switch_(std::make_unique<Switch>(stack_bytes)) {}

Fiber::~Fiber() {
  switch_->ending = true;
  switch_->resume();
  if (__tsan_destroy_fiber != nullptr) __tsan_destroy_fiber(switch_->inside.tsan);
}

void Fiber::start(std::function<void()> job) {
  switch_->job = std::move(job);
  switch_->done = false;
}

bool Fiber::resume() {
  switch_->resume();
  return switch_->done;
}

void Fiber::suspend() { switch_->suspend(); }

}  // namespace tandem::emulation
