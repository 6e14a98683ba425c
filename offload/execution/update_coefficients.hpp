#pragma once
// Coefficients of a step's updates, parameter by parameter, and the cutting of a task into runs that have the same.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/numerics/adam_state.hpp"
#include "core/params/parameter_layout.hpp"
#include "scheduler/tasks/task.hpp"

namespace tandem {

/// Learning rate and hyperparameters of one group of parameters.
struct GroupSettings {
  double lr = 0.0;
  AdamW adamw;
};

/// One parameter's update where it is not like that of the others.
struct ParameterException {
  bool absent = false;              ///< it has no gradient, and stays as it is
  std::int64_t missed_updates = 0;  ///< earlier updates of the state that left it as it was
};

/// Settings of the updates of a step.
struct UpdateSettings {
  std::span<const GroupSettings> groups;           ///< by ParameterOptions::group
  std::span<const ParameterException> exceptions;  ///< by owned parameter, in model order; empty: there are none
  std::int64_t step = 1;                           ///< Adam's t, from 1
  std::uint64_t seed = 0;
  double gradient_scale = 1.0;
};

/// Update coefficients of two successive steps, whose updates may overlap. `set` of one may run beside the use of the
/// other's.
class UpdateCoefficients {
 public:
  explicit UpdateCoefficients(const ParameterLayout& layout);

  /// Sets those of step `step` (`Task::step`).
  void set(const UpdateSettings& settings, std::int64_t step);
  /// Calls `call(piece, coefficients)` for each run of equal hyperparameters in the task's range that is to be updated;
  /// `piece` points at the range's first element.
  template <class Call>
  void for_segments(const Task& task, const AdamPiece& piece, Call call) const;
  /// Whether all updates of step `step` can be taken back (numerics::is_invertible).
  bool are_invertible(std::int64_t step) const noexcept;
  /// Parameters that a task updates, without padding.
  std::int64_t updated_parameters(const Task& task) const;

 private:
  /// A run of state elements with the same hyperparameters.
  struct Segment {
    std::int64_t begin = 0;
    std::int64_t end = 0;
    int coefficients = 0;  ///< index of its class
  };
  /// One parameter's run.
  struct ParameterSegment {
    std::int64_t begin = 0;
    std::int64_t end = 0;    ///< with padding
    std::int64_t count = 0;  ///< without
    std::size_t owned = 0;   ///< index among the owned parameters
    int coefficients = 0;
  };
  /// Coefficients of one step's updates.
  struct StepCoefficients {
    std::vector<AdamCoefficients> of_classes;
    std::vector<AdamCoefficients> of_parameters;  ///< by owned parameter; empty: those of its class
    std::vector<unsigned char> absent;            ///< whether it is left out, likewise by owned parameter
  };
  /// Options of parameters that decide about coefficients.
  struct CoefficientClass {
    bool decay = true;
    double lr_scale = 1.0;
    int group = 0;
    bool operator==(const CoefficientClass&) const = default;
  };

  int class_of(const ParameterOptions& options);
  const StepCoefficients& step_of(const Task& task) const { return steps_[static_cast<std::size_t>(task.step % 2)]; }

  IndexedVector<LayerIndex, std::vector<Segment>> segments_;
  IndexedVector<LayerIndex, std::vector<ParameterSegment>> parameters_;
  std::vector<CoefficientClass> classes_;
  std::array<StepCoefficients, 2> steps_;  ///< coefficients of even and odd steps
};

template <class Call>
void UpdateCoefficients::for_segments(const Task& task, const AdamPiece& piece, Call call) const {
  const StepCoefficients& step = step_of(task);
  const auto update = [&](const auto& segment, const AdamCoefficients& coefficients) {
    const std::int64_t begin = std::max(segment.begin, task.begin);
    const std::int64_t end = std::min(segment.end, task.end);
    if (begin >= end) return;
    AdamPiece part = piece.from(begin - task.begin);
    part.count = end - begin;
    call(part, coefficients);
  };
  if (step.of_parameters.empty()) {
    for (const Segment& s : segments_[task.layer]) update(s, step.of_classes[static_cast<std::size_t>(s.coefficients)]);
    return;
  }
  for (const ParameterSegment& p : parameters_[task.layer]) {
    if (step.absent[p.owned] == 0) update(p, step.of_parameters[p.owned]);
  }
}

}  // namespace tandem
