#pragma once
// State divided as options say, and the plans that can be made of it.
#include <cstddef>

#include "core/params/parameter_layout.hpp"
#include "scheduler/plan/plan.hpp"
#include "scheduler/plan/plan_builder.hpp"

namespace tandem {

/// Settings in which plans of the same division differ.
struct Knobs {
  int prefetch = 1;
  int gradient_buffers = 1;
  bool keep_gradients = false;
  bool send_sums = false;
  bool small_pieces = true;
  bool speculates = false;
  bool codes = false;
  int resident_layers = 0;
  std::size_t file_bytes = 0;  ///< least bytes of state that leave host memory for a file
};

/// The least demanding settings that the options allow.
Knobs smallest_knobs(const ParameterLayout& layout, const OffloadOptions& options);

/// A division of the state, and what its plans share: they are many, as `make_plan` tries one setting after another.
/// Layout and options must outlive it.
class DividedState {
 public:
  DividedState(const ParameterLayout& layout, const OffloadOptions& options);

  const ParameterLayout& layout() const noexcept { return layout_; }
  const OffloadOptions& options() const noexcept { return options_; }

  Plan plan(const Knobs& knobs) const;
  /// The least demanding plan.
  Plan smallest() const { return plan(smallest_knobs(layout_, options_)); }

 private:
  const ParameterLayout& layout_;
  const OffloadOptions& options_;
  PlanBuilder divided_;
};

}  // namespace tandem
