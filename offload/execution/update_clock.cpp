#include "offload/execution/update_clock.hpp"

#include "core/base/trace.hpp"

namespace tandem {

void UpdateClock::note_submitted(const Task& task) {
  if (is_update(task.kind) && left_++ == 0) began_ = trace_now();
}

void UpdateClock::note_done(const Task& task) {
  if (!is_update(task.kind) || --left_ > 0) return;
  ended_ = trace_now();
  seconds_ = seconds_ + (ended_ - began_);
}

}  // namespace tandem
