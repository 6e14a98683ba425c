#include "core/base/start_thread.hpp"

#include <fmt/format.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <string>
#include <system_error>
#include <utility>

#include "core/base/error.hpp"

namespace tandem {
namespace {

/// The kernel's sched_attr: glibc has no wrapper for it before 2.41.
struct SchedulingAttributes {
  std::uint32_t size = sizeof(SchedulingAttributes), policy = 0;
  std::uint64_t flags = 0;
  std::int32_t nice = 0;
  std::uint32_t priority = 0;
  std::uint64_t slice_ns = 0, deadline_ns = 0, period_ns = 0;
};

}  // namespace

std::thread start_thread(std::string_view name, std::function<void()> body) {
  std::thread thread;
  try {
    thread = std::thread(std::move(body));
  } catch (const std::system_error& e) {
    throw DeviceError(fmt::format("cannot start thread '{}'", name), e.code().message(),
                      "raise the limit of threads (ulimit -u)");
  }
  pthread_setname_np(thread.native_handle(), std::string(name.substr(0, 15)).c_str());
  return thread;
}

void wake_promptly() noexcept {
  constexpr std::uint64_t shortest_slice_ns = 100'000;  // the shortest that the kernel accepts
  constexpr std::uint64_t reset_on_fork = 1;
  SchedulingAttributes own;
  if (::syscall(SYS_sched_getattr, 0, &own, sizeof(own), 0) != 0) return;
  own.slice_ns = shortest_slice_ns;
  own.flags = reset_on_fork;
  ::syscall(SYS_sched_setattr, 0, &own, 0);
}

}  // namespace tandem
