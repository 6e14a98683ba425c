#include "offload/engine/present_gradients.hpp"

#include <algorithm>

namespace tandem {

PresentGradients::PresentGradients(const ParameterLayout& layout, bool owners_make_gradients)
    : trained_(layout.layers().size()) {
  const std::vector<const Parameter*> owned = layout.owned_parameters();
  present_.resize(owned.size());
  for (const LayerIndex l : trained_.indices()) {
    const std::vector<Parameter>& parameters = layer_at(layout, l).parameters;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const Parameter& declared = parameters[i];
      if (declared.tied() && owners_make_gradients) continue;
      const Parameter& owner =
          declared.tied() ? layout.layer(declared.tied_layer).parameters[static_cast<std::size_t>(declared.tied_index)]
                          : declared;
      if (!owner.options.trainable) continue;
      const auto found = std::ranges::find(owned, &owner);
      trained_[l].push_back({i, static_cast<std::size_t>(found - owned.begin())});
    }
  }
}

void PresentGradients::begin_step(bool tracks) {
  tracks_ = tracks;
  if (tracks) std::ranges::fill(present_, static_cast<unsigned char>(0));
}

void PresentGradients::add(LayerIndex layer, std::span<const std::size_t> left_out) {
  if (!tracks_) return;
  for (const Trained& parameter : trained_[layer]) {
    if (std::ranges::find(left_out, parameter.in_layer) == left_out.end()) present_[parameter.owned] = 1;
  }
}

}  // namespace tandem
