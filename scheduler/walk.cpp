#include "scheduler/walk.hpp"

#include <algorithm>
#include <initializer_list>

namespace tandem {
namespace {

/// Forward and backward with some micro-batches through each layer at once, which stand for `whole`.
class Pass {
 public:
  Pass(std::vector<Action>& walk, int micro_batches, int whole)
      : walk_(walk), micro_batches_(micro_batches), whole_(whole) {}

  void through(int layers) {
    using K = Action::Kind;
    const std::size_t first = walk_.size() + 1;
    for (int l = 0; l + 1 < layers; ++l) {
      add(l, {K::fetch});
      for (int micro = 0; micro < micro_batches_; ++micro) add(l, {K::compute_forward}, micro);
      add(l, {K::release});
    }
    add(layers - 1, {K::fetch});
    add_each(layers - 1, {K::compute_forward, K::gradients, K::compute_backward});
    for (int l = layers - 2; l > 0; --l) {
      add(l, {K::fetch});
      add_each(l, {K::gradients, K::compute_backward});
    }
    if (layers > 1) add_each(0, {K::gradients, K::compute_backward}, /*releases=*/false);
    walk_[first].opens_pass = true;
  }

 private:
  void add(int layer, std::initializer_list<Action::Kind> kinds, int micro = 0) {
    const bool several = micro_batches_ < whole_ && micro == 1;
    const double stands_for = several ? static_cast<double>(whole_ - micro_batches_ + 1) : 1.0;
    for (const Action::Kind kind : kinds) walk_.push_back({kind, layer, stands_for});
  }
  void add_each(int layer, std::initializer_list<Action::Kind> kinds, bool releases = true) {
    for (int micro = 0; micro < micro_batches_; ++micro) {
      add(layer, kinds, micro);
      if (releases && micro + 1 == micro_batches_) add(layer, {Action::Kind::release}, micro);
      add(layer, {Action::Kind::commit}, micro);
    }
  }

  std::vector<Action>& walk_;
  int micro_batches_;
  int whole_;
};

}  // namespace

std::vector<Action> walk_of(int layers, const Accumulation& walked, const Accumulation& whole) {
  std::vector<Action> walk;
  for (int first = 0; first < walked.micro_batches; first += walked.at_once) {
    const int at_once = std::min(walked.at_once, walked.micro_batches - first);
    Pass(walk, at_once, whole.passes() == 1 ? whole.at_once : at_once).through(layers);
  }
  return walk;
}

}  // namespace tandem
