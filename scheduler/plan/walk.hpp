#pragma once
// What the caller's thread does in a step, one thing after another: forward and backward of tandem's models.
#include <cstdint>
#include <vector>

namespace tandem {

struct Action {
  enum class Kind : std::uint8_t { fetch, compute_forward, gradients, compute_backward, release, commit };
  Kind kind = Kind::fetch;
  int layer = -1;
  double micro_batches = 1.0;  ///< that it stands for: work on activations and gradients is as many times as long
  bool opens_pass = false;     ///< the first compute of a pass through all layers
};

/// How many micro-batches a step has, and how many of them pass through each layer at once.
struct Accumulation {
  int micro_batches = 1;
  int at_once = 1;
  int passes() const noexcept { return (micro_batches + at_once - 1) / at_once; }
  int in_last_pass() const noexcept { return micro_batches - (passes() - 1) * at_once; }
};

/// A step: pass after pass, the last perhaps with fewer micro-batches. What all others do is kept once, since a step
/// may have any number of them.
struct Walk {
  std::vector<Action> pass;  ///< of each but the last; never empty
  std::vector<Action> last;
  std::int64_t passes = 1;  ///< with the last

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
