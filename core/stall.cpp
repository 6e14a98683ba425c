#include "core/stall.hpp"

#include <atomic>

namespace tandem {
namespace {

std::atomic<StallHandler> the_handler{nullptr};

}  // namespace

void set_stall_handler(StallHandler handler) noexcept { the_handler = handler; }

void report_stall(const StalledError& error) noexcept {
  if (const StallHandler handler = the_handler.exchange(nullptr)) handler(error);
}

}  // namespace tandem
