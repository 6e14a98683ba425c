#pragma once
// Annotations of kernels under emulation for ThreadSanitizer, where it is part of the program: it takes fibers for
// threads, and only barriers order them. Files that include this are not instrumented themselves; functions of the
// standard library that they call may be.

// Found in the program where it was built with ThreadSanitizer, null elsewhere.
// NOLINTBEGIN(bugprone-reserved-identifier, readability-identifier-naming): names of the sanitizer's
extern "C" {
[[gnu::weak]] void __tsan_acquire(void* address);
[[gnu::weak]] void __tsan_release(void* address);
[[gnu::weak]] void __tsan_read_range(void* address, unsigned long bytes);
[[gnu::weak]] void AnnotateIgnoreReadsBegin(const char* file, int line);
[[gnu::weak]] void AnnotateIgnoreReadsEnd(const char* file, int line);
[[gnu::weak]] void AnnotateIgnoreWritesBegin(const char* file, int line);
[[gnu::weak]] void AnnotateIgnoreWritesEnd(const char* file, int line);
}
// NOLINTEND(bugprone-reserved-identifier, readability-identifier-naming)

namespace tandem::emulation {

/// Guard that hides the reads and writes of its fiber from ThreadSanitizer: those of the emulation itself, in which the
/// threads of a kernel take turns.
class Unseen {
 public:
  Unseen() {
    if (AnnotateIgnoreReadsBegin == nullptr) return;
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  }
  ~Unseen() {
    if (AnnotateIgnoreReadsEnd == nullptr) return;
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  }
  Unseen(const Unseen&) = delete;
  Unseen& operator=(const Unseen&) = delete;
};

/// Order of a grid's threads, for ThreadSanitizer: work of one thread before `reached` comes before work of others
/// after `passed`.
class OrderedBy {
 public:
  void reached() {
    if (__tsan_release != nullptr) __tsan_release(this);
  }
  void passed() {
    if (__tsan_acquire != nullptr) __tsan_acquire(this);
  }
};

}  // namespace tandem::emulation
