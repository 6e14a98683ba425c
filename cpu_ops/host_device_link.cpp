#include "cpu_ops/host_device_link.hpp"

#include <sys/prctl.h>

#include <algorithm>
#include <cmath>
#include <thread>
#include <utility>

#include "core/error.hpp"

namespace tandem {

LinkClock LinkClock::real() {
  return {[] { return std::chrono::steady_clock::now(); },
          [](Time until) {
            // Sleeps end up to 50 us late by default, which is more than a small copy takes.
            thread_local const int precise = ::prctl(PR_SET_TIMERSLACK, 1UL, 0UL, 0UL, 0UL);
            static_cast<void>(precise);
            std::this_thread::sleep_until(until);
          }};
}

HostLink::HostLink(double bytes_per_second, LinkClock clock) : rate_(bytes_per_second), clock_(std::move(clock)) {
  if (!std::isfinite(rate_) || rate_ < 0) {
    throw UsageError("bad bandwidth of the emulated link", "it must be finite and not negative",
                     "give bytes per second, or 0 for no emulation");
  }
}

void HostLink::carry(std::size_t bytes, const std::function<void()>& copy) {
  if (rate_ == 0) return copy();
  const LinkClock::Time done = book(bytes);
  copy();
  clock_.sleep_until(done);
}

LinkClock::Time HostLink::book(std::size_t bytes) {
  using Duration = LinkClock::Time::duration;
  const auto taken =
      std::chrono::duration_cast<Duration>(std::chrono::duration<double>(static_cast<double>(bytes) / rate_));
  const std::lock_guard lock(mutex_);
  free_at_ = std::max(free_at_, clock_.now()) + taken;
  return free_at_;
}

}  // namespace tandem
