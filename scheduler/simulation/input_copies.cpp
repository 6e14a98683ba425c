#include "scheduler/simulation/input_copies.hpp"

namespace tandem {
namespace {

constexpr std::size_t index(InputCopies::Way way) noexcept { return static_cast<std::size_t>(way); }

}  // namespace

void InputCopies::begin_pass(std::size_t micro_batches) {
  micro_batches_ = micro_batches;
  stand_for_.clear();
  read_ = 0;
  looked_after_ = 0;
}

InputCopies::Part InputCopies::written(double stands_for) {
  const std::size_t n = stand_for_.size();
  stand_for_.push_back(stands_for);
  Part part;
  if (n >= slots_) part.waits_for[index(Way::to_host)] = ++awaited_[index(Way::to_host)];
  if (leaves(n)) part.starts[index(Way::to_host)] = stands_for;
  return part;
}

InputCopies::Part InputCopies::read() {
  Part part;
  if (leaves(number_read(read_++))) part.waits_for[index(Way::to_device)] = ++awaited_[index(Way::to_device)];
  part.starts[index(Way::to_device)] = next_fetch();
  return part;
}

/// Inputs that the next fetch stands for: the next input that backward reads of all that left; 0: there is none.
double InputCopies::next_fetch() {
  while (looked_after_ < count()) {
    const std::size_t n = number_read(looked_after_++);
    if (leaves(n)) return stand_for_[n];
  }
  return 0.0;
}

bool InputCopies::may_run(const Part& part) const noexcept {
  for (const Way way : ways) {
    if (part.waits_for[index(way)] > copied_[index(way)]) return false;
  }
  return true;
}

void InputCopies::ran(const Part& part) {
  for (const Way way : ways) {
    if (part.starts[index(way)] > 0.0) queues_[index(way)].push_back(part.starts[index(way)]);
  }
}

double InputCopies::next(Way way) const noexcept {
  const std::deque<double>& queue = queues_[index(way)];
  return queue.empty() ? 0.0 : queue.front();
}

void InputCopies::copied(Way way) {
  queues_[index(way)].pop_front();
  ++copied_[index(way)];
}

}  // namespace tandem
