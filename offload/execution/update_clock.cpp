#include "offload/execution/update_clock.hpp"

#include "core/base/trace.hpp"

namespace tandem {

void UpdateClock::begin() { began_ = trace_now(); }

void UpdateClock::end() {
  ended_ = trace_now();
  seconds_ = seconds_ + (ended_ - began_);
}

}  // namespace tandem
