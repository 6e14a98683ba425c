#pragma once
// The work of the caller's thread in a step, one action after another: forward and backward of tandem's models.
#include <cstdint>
#include <vector>

#include "scheduler/plan/indices.hpp"

namespace tandem {

struct Action {
  enum class Kind : std::uint8_t { fetch, compute_forward, gradients, compute_backward, release, commit };
  Kind kind = Kind::fetch;
  LayerIndex layer;
  /// Micro-batches that the action stands for: work on activations and gradients takes as many times as long.
  double micro_batches = 1.0;
  bool opens_pass = false;  ///< the first compute of a pass through all layers
};

/// Number of micro-batches of a step, and of those that pass through each layer at once.
struct Accumulation {
  int micro_batches = 1;
  int at_once = 1;
  int passes() const noexcept { return (micro_batches + at_once - 1) / at_once; }
  int in_last_pass() const noexcept { return micro_batches - (passes() - 1) * at_once; }
};

/// A step: pass after pass, the last perhaps with fewer micro-batches. The actions of all other passes are kept once,
/// since a step may have any number of them.
struct Walk {
  std::vector<Action> pass;  ///< actions of each pass but the last; never empty
  std::vector<Action> last;
  std::int64_t passes = 1;  ///< number of passes, the last included

  std::int64_t before_last() const noexcept { return (passes - 1) * static_cast<std::int64_t>(pass.size()); }
  std::int64_t size() const noexcept { return before_last() + static_cast<std::int64_t>(last.size()); }
  const Action& operator[](std::int64_t i) const noexcept {
    const bool in_last = i >= before_last();
    const auto index = static_cast<std::size_t>(i);
    return in_last ? last[index - static_cast<std::size_t>(before_last())] : pass[index % pass.size()];
  }
};

/// A step of `layers` layers as `walked`: either all of `whole`, or that coarsened, with as many passes, where a
/// micro-batch may stand for several. A layer alone in its layout is both first and last. `first_again`: the first
/// layer's backward takes its weights, as it does where it makes all of a tied table's gradient.
Walk walk_of(int layers, const Accumulation& walked, const Accumulation& whole, bool first_again);

}  // namespace tandem
