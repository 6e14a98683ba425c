#pragma once
// Data parallelism on the CPU behind one small interface: served by oneTBB, and by a pool of our own
// in builds under ThreadSanitizer (the distribution's oneTBB is not instrumented).
#include <cstdint>
#include <memory>
#include <type_traits>

namespace tandem {

/// A non-owning reference to a callable `void(std::int64_t index)`.
class IndexFunction {
 public:
  template <class F>
    requires(!std::is_same_v<std::remove_cvref_t<F>, IndexFunction>)
  IndexFunction(const F& f)  // NOLINT: implicit, like a function reference
      : object_(&f), call_([](const void* o, std::int64_t i) { (*static_cast<const F*>(o))(i); }) {}
  void operator()(std::int64_t i) const { call_(object_, i); }

 private:
  const void* object_;
  void (*call_)(const void*, std::int64_t);
};

/// A task arena of a fixed number of threads (the caller is one of them).
class Parallel {
 public:
  virtual ~Parallel() = default;
  virtual int threads() const noexcept = 0;
  /// Calls body(0) ... body(count - 1), each once, on any thread, and returns when all are done.
  /// Which thread runs which index is not fixed: results must not depend on it. Rethrows the first
  /// exception of a body. May be called from several threads at once.
  virtual void run(std::int64_t count, IndexFunction body) = 0;
};

}  // namespace tandem
