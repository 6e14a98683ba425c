#include "scheduler/plan/walk.hpp"

#include <algorithm>
#include <initializer_list>
#include <utility>

namespace tandem {
namespace {

/// Forward and backward with some micro-batches through each layer at once, which stand for `whole`.
class Pass {
 public:
  Pass(int micro_batches, int whole) : micro_batches_(micro_batches), whole_(whole) {}

  std::vector<Action> through(int layers, bool first_again) && {
    using K = Action::Kind;
    const std::size_t most_of_layer = 4 * (static_cast<std::size_t>(micro_batches_) + 1);
    const LayerIndex first(0), last(layers - 1);
    actions_.reserve(static_cast<std::size_t>(layers) * most_of_layer);
    for (LayerIndex l = first; l < last; ++l) {
      add(l, {K::fetch});
      for (int micro = 0; micro < micro_batches_; ++micro) add(l, {K::compute_forward}, micro);
      add(l, {K::release});
    }
    add(last, {K::fetch});
    add_each(last, {K::compute_forward, K::gradients, K::compute_backward});
    for (LayerIndex l = last - 1; l > first; --l) {
      add(l, {K::fetch});
      add_each(l, {K::gradients, K::compute_backward});
    }
    if (layers > 1 && first_again) add(first, {K::fetch});
    if (layers > 1) add_each(first, {K::gradients, K::compute_backward}, /*releases=*/first_again);
    actions_[1].opens_pass = true;  // the first fetches
    return std::move(actions_);
  }

 private:
  void add(LayerIndex layer, std::initializer_list<Action::Kind> kinds, int micro = 0) {
    const bool between = micro > 0 && micro < micro_batches_ - 2;
    const double stands_for = between ? static_cast<double>(whole_ - 3) / (micro_batches_ - 3) : 1.0;
    for (const Action::Kind kind : kinds) actions_.push_back({kind, layer, stands_for});
  }
  void add_each(LayerIndex layer, std::initializer_list<Action::Kind> kinds, bool releases = true) {
    for (int micro = 0; micro < micro_batches_; ++micro) {
      add(layer, kinds, micro);
      if (releases && micro + 1 == micro_batches_) add(layer, {Action::Kind::release}, micro);
      add(layer, {Action::Kind::commit}, micro);
    }
  }

  std::vector<Action> actions_;
  int micro_batches_;
  int whole_;
};

}  // namespace

Walk walk_of(int layers, const Accumulation& walked, const Accumulation& whole, bool first_again) {
  const auto pass = [&](int micro_batches, int of) { return Pass(micro_batches, of).through(layers, first_again); };
  std::vector<Action> last = pass(walked.in_last_pass(), whole.in_last_pass());
  if (walked.passes() == 1) return {last, last, 1};
  return {pass(std::min(walked.at_once, walked.micro_batches), std::min(whole.at_once, whole.micro_batches)),
          std::move(last), walked.passes()};
}

}  // namespace tandem
