#pragma once
// A fake of NCCL, as a library to be loaded: ranks may be threads of one process or processes. It keeps what NCCL
// documents and nothing more: a group of sends and receives is queued on its stream at some time until the communicator
// says that it is no longer in progress, and moves its bytes, all at once and with random delays, when the fake CUDA
// runtime's stream gets there. What NCCL leaves undefined is a complaint of the fake runtime (fake_cuda::complaints):
// sizes that differ, bytes that nobody receives, peers that are none, memory that is not the card's, groups that were
// not begun, a communicator that is gone, that is not ready, or that two threads use at a time.
#include <dlfcn.h>

#include <cstdint>
#include <stdexcept>

namespace tandem::fake_nccl {

/// ncclResult_t.
enum Code : int {
  success = 0,
  unhandled_cuda_error = 1,
  system_error = 2,
  internal_error = 3,
  invalid_argument = 4,
  invalid_usage = 5,
  remote_error = 6,
  in_progress = 7,
};

/// Settings of the fake.
struct Behaviour {
  int longest_delay_us = 0;       ///< longest delay of a group, drawn from the fake machine's seed
  bool tells_lost_ranks = false;  ///< a rank that is gone is an asynchronous error; else others wait for ever for it
  bool breaks_bytes = false;      ///< received bytes differ from those that were sent
};

/// The functions by which tests steer the fake, in the process that has loaded it from `file`. `FakeNccl::fail`: from
/// now on the `position`-th call (0: the next) of `function`, or of any where it is null, fails once with `code`;
/// position -1 only counts. TANDEM_FAKE_NCCL_FAIL=POSITION:CODE does so for a program, TANDEM_FAKE_NCCL_VERSION=21803
/// says another version.
class FakeNccl {
 public:
  explicit FakeNccl(const char* file) {
    void* const handle = ::dlopen(file, RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) throw std::runtime_error(::dlerror());
    take(handle, "fake_nccl_behave", behave);
    take(handle, "fake_nccl_fail", fail);
    take(handle, "fake_nccl_calls", calls);
    take(handle, "fake_nccl_alive", alive);
    take(handle, "fake_nccl_fail_outside_calls", fail_outside_calls);
  }
  void (*behave)(const Behaviour* behaviour) = nullptr;
  void (*fail)(const char* function, std::int64_t position, int code) = nullptr;
  /// Calls since the last `fail`.
  std::int64_t (*calls)() = nullptr;
  /// Communicators that are neither destroyed nor aborted.
  int (*alive)() = nullptr;
  /// Every communicator meets an error that is no call's.
  void (*fail_outside_calls)(int code) = nullptr;

 private:
  template <class Function>
  static void take(void* handle, const char* name, Function*& function) {
    function = reinterpret_cast<Function*>(::dlsym(handle, name));
    if (function == nullptr) throw std::runtime_error(name);
  }
};

}  // namespace tandem::fake_nccl
