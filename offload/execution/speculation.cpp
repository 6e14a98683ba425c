#include "offload/execution/speculation.hpp"

#include <limits>
#include <numeric>
#include <span>

#include "core/ops/undo_record.hpp"

namespace tandem {
namespace {

bool same(const AdamCoefficients& a, const AdamCoefficients& b) {
  return a.gradient_scale == b.gradient_scale && a.beta1 == b.beta1 && a.one_minus_beta1 == b.one_minus_beta1 &&
         a.beta2 == b.beta2 && a.one_minus_beta2 == b.one_minus_beta2 &&
         a.inv_sqrt_correction2 == b.inv_sqrt_correction2 && a.eps == b.eps &&
         a.minus_step_size == b.minus_step_size && a.minus_lr == b.minus_lr && a.minus_decay == b.minus_decay &&
         a.seed == b.seed && a.step == b.step;
}

}  // namespace

Speculation::Speculation(UpdateKernels& kernels, const ParameterLayout& layout, const Plan& plan,
                         const Storage& storage)
    : kernels_(kernels),
      plan_(plan),
      storage_(storage),
      coefficients_(layout),
      updated_elements_(plan.subgroups.size(), 0) {}

void Speculation::follow_plan() { updated_elements_.assign(plan_.subgroups.size(), 0); }

bool Speculation::begin(const UpdateSettings& settings, std::int64_t step, std::optional<double> most_norm) {
  coefficients_.set(settings, step);
  if (!coefficients_.are_invertible(step)) return false;
  most_squares_ = most_norm ? *most_norm * *most_norm : std::numeric_limits<double>::infinity();
  open_step_ = step;
  return true;
}

/// The record of a part of a subgroup.
UndoPiece Speculation::undo_of(const Task& task, const AdamPiece& subgroup, const AdamPiece& part) const {
  const SubgroupMemory& memory = storage_.subgroup(task.subgroup);
  return {memory.undo, subgroup.count, static_cast<std::int64_t>(part.index - subgroup.index), memory.host_norm};
}

/// Whether the step is known to be clipped, now that this subgroup's gradient is complete: sums of squares only grow.
bool Speculation::exceeds(const Task& task) {
  if (squares_step_ != task.step) {
    squares_step_ = task.step;
    squares_ = 0.0;
  }
  const double* const norms = storage_.subgroup(task.subgroup).host_norm;
  squares_ = std::accumulate(norms, norms + task.count() / layout_quantum, squares_);
  return squares_ > most_squares_;
}

void Speculation::speculate(const Task& task, const AdamPiece& piece) {
  if (open_step_ != task.step || exceeds(task)) return;
  std::int64_t& updated = updated_of(task);
  coefficients_.for_segments(task, piece, [&](const AdamPiece& part, const AdamCoefficients& c) {
    updated += kernels_.speculate(part, c, undo_of(task, piece, part), plan_.update_threads);
  });
  updated_ += static_cast<std::uint64_t>(updated);
}

bool Speculation::settle(const Task& task, const AdamPiece& piece, const UpdateCoefficients& actual) {
  if (updated_of(task) == 0) return false;
  // Both divide a subgroup alike: which parameters miss a step is known before it begins.
  decided_.clear();
  actual.for_segments(task, piece, [&](const AdamPiece&, const AdamCoefficients& c) { decided_.push_back(c); });
  std::size_t next = 0;
  bool confirmed = true;
  coefficients_.for_segments(task, piece, [&](const AdamPiece& part, const AdamCoefficients& c) {
    const AdamCoefficients& decision = decided_[next++];
    confirmed = confirmed && same(c, decision);
    const Settling settling = same(c, decision) ? Settling::confirm : Settling::redo;
    kernels_.settle(part, c, decision, settling, undo_of(task, piece, part), plan_.update_threads);
  });
  if (!confirmed) taken_back_ += static_cast<std::uint64_t>(updated_of(task));
  updated_of(task) = 0;
  return true;
}

void Speculation::retract(const Task& task, const AdamPiece& piece) {
  if (updated_of(task) == 0) return;
  coefficients_.for_segments(task, piece, [&](const AdamPiece& part, const AdamCoefficients& c) {
    kernels_.settle(part, c, c, Settling::retract, undo_of(task, piece, part), plan_.update_threads);
  });
  taken_back_ += static_cast<std::uint64_t>(updated_of(task));
  updated_of(task) = 0;
}

}  // namespace tandem
