#include "core/base/stall.hpp"

#include <fmt/format.h>

#include <atomic>

#include "core/base/trace.hpp"

namespace tandem {
namespace {

std::atomic<StallHandler> the_handler{nullptr};

}  // namespace

ProgressWatch::ProgressWatch(double limit_seconds, std::uint64_t made)
    : limit_(limit_seconds), since_(trace_now()), seen_(made) {}

std::optional<double> ProgressWatch::stalled(std::uint64_t made) {
  const double now = trace_now();
  if (made != seen_) {
    seen_ = made;
    since_ = now;
  }
  if (now - since_ > limit_) return now - since_;
  return std::nullopt;
}

StalledError stalled(std::string_view what, double seconds, std::string_view who) {
  return StalledError(fmt::format("waiting for {} made no progress for {:.0f} s", what, seconds),
                      fmt::format("{} does no more", who));
}

void set_stall_handler(StallHandler handler) noexcept { the_handler = handler; }

void report_stall(const StalledError& error) noexcept {
  if (const StallHandler handler = the_handler.exchange(nullptr)) handler(error);
}

}  // namespace tandem
