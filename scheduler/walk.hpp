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
};

/// A step of `layers` layers as `walked`: either all of `whole`, or that in lumps, where a micro-batch may stand for
/// several. A pass never does. A layer alone in its layout is both first and last.
std::vector<Action> walk_of(int layers, const Accumulation& walked, const Accumulation& whole);

}  // namespace tandem
