#include "train/runtime/module_clock.hpp"

#include <utility>

namespace tandem {

void ModuleClock::begin(StreamPart part, StreamView stream) {
  const Begun next{part, backward_};
  if (next == queued_) return;
  marks_.set(stream);
  begun_.push_back(next);
  queued_ = next;
}

void ModuleClock::count(ModuleKind kind, double matmul_flops, double attention_flops) noexcept {
  PartFigures& of = figures_[static_cast<std::size_t>(kind)];
  of.matmul_flops += matmul_flops;
  of.attention_flops += attention_flops;
  ++of.calls;
}

StreamFigures ModuleClock::take() {
  const std::vector<double>& passed = marks_.take();
  for (std::size_t i = 0; i < begun_.size(); ++i) {
    const double seconds = passed[i] - std::exchange(since_, passed[i]);
    const Begun of = std::exchange(current_, begun_[i]);
    if (of.part == end_part) continue;
    PartFigures& figures = figures_[of.part];
    (of.backward ? figures.backward_seconds : figures.forward_seconds) += seconds;
  }
  begun_.clear();
  return std::exchange(figures_, {});
}

}  // namespace tandem
