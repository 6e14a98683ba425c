#pragma once
// Uses of a layer by the caller: places of its weights and of its gradients.
#include <array>
#include <cstddef>

#include "core/params/parameter_access.hpp"
#include "scheduler/tasks/task.hpp"

namespace tandem {

/// Place of one layer's weights for a use: `buffer` indexes all weight buffers, -1: resident.
struct WeightPlace {
  LayerIndex layer;
  int buffer = -1;
};

/// Place of a layer's gradient. `fresh`: the caller's stream must first zero what is to be added to. `sole`: no other
/// use of a layer adds to it.
struct GradientPlace {
  LayerIndex layer;
  int buffer = -1;
  bool fresh = false;
  bool sole = false;
};

/// A place for a layer itself, then one for each that it borrows from.
template <class Place>
class Places {
 public:
  void add(const Place& place) { places_.at(count_++) = place; }
  bool empty() const noexcept { return count_ == 0; }
  const Place* begin() const noexcept { return places_.data(); }
  const Place* end() const noexcept { return places_.data() + count_; }

 private:
  std::array<Place, LayerBases::capacity> places_{};
  std::size_t count_ = 0;
};

/// The caller's use of a layer's weights: the task `id`, for whose dependencies its stream waits.
struct LayerUse {
  TaskId id = no_task;
  Places<WeightPlace> weights;
};

/// The caller's use of a layer's gradients in one micro-batch.
struct GradientUse {
  TaskId id = no_task;
  LayerIndex layer;
  int micro = 0;
  Places<GradientPlace> gradients;  ///< layers without state are left out
};

}  // namespace tandem
