#include "offload/execution/update_coefficients.hpp"

#include "core/numerics/undo.hpp"

namespace tandem {

int UpdateCoefficients::class_of(const ParameterOptions& options) {
  const CoefficientClass own{options.decay, options.lr_scale, options.group};
  const auto found = std::ranges::find(classes_, own);
  const auto index = static_cast<int>(found - classes_.begin());
  if (found == classes_.end()) classes_.push_back(own);
  return index;
}

UpdateCoefficients::UpdateCoefficients(const ParameterLayout& layout) {
  std::size_t owned = 0;
  for (const Layer& layer : layout.layers()) {
    std::vector<ParameterSegment> parameters;
    for (const Parameter& p : layer.parameters) {
      if (p.tied()) continue;
      const std::size_t index = owned++;
      if (!p.options.trainable) continue;
      parameters.push_back({p.offset, p.offset + p.padded_count, p.count, index, class_of(p.options)});
    }
    std::ranges::sort(parameters, {}, &ParameterSegment::begin);
    std::vector<Segment> merged;
    for (const ParameterSegment& p : parameters) {
      if (!merged.empty() && merged.back().end == p.begin && merged.back().coefficients == p.coefficients) {
        merged.back().end = p.end;
      } else {
        merged.push_back({p.begin, p.end, p.coefficients});
      }
    }
    segments_.push_back(std::move(merged));
    parameters_.push_back(std::move(parameters));
  }
}

void UpdateCoefficients::set(const UpdateSettings& settings, std::int64_t step) {
  StepCoefficients& coefficients = steps_[static_cast<std::size_t>(step % 2)];
  coefficients.of_classes.clear();
  const auto of = [&](const CoefficientClass& c, std::int64_t t) {
    const GroupSettings& group = settings.groups[static_cast<std::size_t>(c.group)];
    return numerics::adam_coefficients(group.adamw, t, group.lr * c.lr_scale, settings.gradient_scale, c.decay,
                                       settings.seed);
  };
  for (const CoefficientClass& c : classes_) coefficients.of_classes.push_back(of(c, settings.step));
  coefficients.of_parameters.assign(settings.exceptions.size(), {});
  coefficients.absent.assign(settings.exceptions.size(), 0);
  if (settings.exceptions.empty()) return;
  for (const std::vector<ParameterSegment>& layer : parameters_) {
    for (const ParameterSegment& p : layer) {
      const ParameterException& exception = settings.exceptions[p.owned];
      coefficients.absent[p.owned] = exception.absent ? 1 : 0;
      coefficients.of_parameters[p.owned] =
          of(classes_[static_cast<std::size_t>(p.coefficients)], settings.step - exception.missed_updates);
    }
  }
}

bool UpdateCoefficients::are_invertible(std::int64_t step) const noexcept {
  const StepCoefficients& of_step = steps_[static_cast<std::size_t>(step % 2)];
  return std::ranges::all_of(of_step.of_classes, numerics::is_invertible);
}

std::int64_t UpdateCoefficients::updated_parameters(const Task& task) const {
  const StepCoefficients& step = step_of(task);
  std::int64_t count = 0;
  for (const ParameterSegment& p : parameters_[task.layer]) {
    if (!step.absent.empty() && step.absent[p.owned] != 0) continue;
    count += std::max<std::int64_t>(0, std::min(task.end, p.begin + p.count) - std::max(task.begin, p.begin));
  }
  return count;
}

}  // namespace tandem
