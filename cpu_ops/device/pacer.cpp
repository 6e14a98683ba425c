#include "cpu_ops/device/pacer.hpp"

#include <fmt/format.h>
#include <sys/prctl.h>

#include <algorithm>
#include <cmath>
#include <thread>
#include <utility>

#include "core/base/error.hpp"

namespace tandem {

PacerClock PacerClock::real() {
  return {[] { return std::chrono::steady_clock::now(); },
          [](Time until) {
            // Sleeps end up to 50 us late by default, which is more than a small copy takes.
            thread_local const int precise = ::prctl(PR_SET_TIMERSLACK, 1UL, 0UL, 0UL, 0UL);
            static_cast<void>(precise);
            std::this_thread::sleep_until(until);
          }};
}

Pacer::Pacer(const char* what, double rate, PacerClock clock) : rate_(rate), clock_(std::move(clock)) {
  if (!std::isfinite(rate_) || rate_ < 0) {
    throw UsageError(fmt::format("bad rate of {}", what), "it must be finite and not negative",
                     "give units per second, or 0 for no emulation");
  }
}

void Pacer::run(double amount, const std::function<void()>& work) {
  if (rate_ == 0) return work();
  const PacerClock::Time done = book(amount);
  work();
  if (clock_.now() >= done) return;  // the work itself is slower
  clock_.sleep_until(done);
  const auto late = std::max(clock_.now() - done, PacerClock::Time::duration::zero());
  const std::lock_guard lock(mutex_);
  if (free_at_ == done) overslept_ = late;
}

PacerClock::Time Pacer::book(double amount) {
  using Duration = PacerClock::Time::duration;
  const auto taken = std::chrono::duration_cast<Duration>(std::chrono::duration<double>(amount / rate_));
  const std::lock_guard lock(mutex_);
  free_at_ = std::max(free_at_, clock_.now() - overslept_) + taken;
  overslept_ = {};
  return free_at_;
}

}  // namespace tandem
