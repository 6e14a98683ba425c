#pragma once
// A step of an engine alone: nothing is computed.
#include "offload/engine/engine.hpp"

namespace tandem::testing {

/// Up to its end, which is the caller's: gradients of all layers, whatever is in them, in backward's order.
inline void begin_bare_step(OffloadEngine& engine, int layers, StreamView stream) {
  engine.begin_step({});
  for (int layer = layers - 1; layer >= 0; --layer) {
    const WeightsGuard weights = engine.fetch(layer, stream);
    engine.gradients(layer, stream).commit(stream);
  }
}

}  // namespace tandem::testing
