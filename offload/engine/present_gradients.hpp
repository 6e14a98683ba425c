#pragma once
// Parameters that have a gradient in the open step, where some may have none.
#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "core/base/index.hpp"
#include "core/params/parameter_layout.hpp"
#include "scheduler/plan/indices.hpp"

namespace tandem {

class PresentGradients {
 public:
  /// Whether the gradient of a tied parameter comes with its owner's, as the plan has it.
  explicit PresentGradients(const ParameterLayout& layout, bool owners_make_gradients);

  /// `tracks`: false where every parameter has a gradient, and `add` has nothing to note.
  void begin_step(bool tracks);
  bool tracks() const noexcept { return tracks_; }
  /// A layer has committed its gradients but those that were left out, by their indices in the layer.
  void add(LayerIndex layer, std::span<const std::size_t> left_out);
  /// Whether an owned parameter, by its index among them, has a gradient. Only where it tracks.
  bool has(std::size_t parameter) const { return present_[parameter] != 0; }
  /// A byte for each owned parameter: 1 where it has a gradient.
  std::span<const unsigned char> all() const noexcept { return present_; }

 private:
  struct Trained {
    std::size_t in_layer;  ///< index in the layer
    std::size_t owned;     ///< index among the owned parameters
  };
  IndexedVector<LayerIndex, std::vector<Trained>> trained_;
  std::vector<unsigned char> present_;
  bool tracks_ = false;
};

}  // namespace tandem
