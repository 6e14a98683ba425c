#pragma once
// Updates on the CPU that run before the gradient norm is known, and what becomes of them.
#include <atomic>
#include <cstdint>
#include <optional>
#include <vector>

#include "core/ops/update_kernels.hpp"
#include "core/params/parameter_layout.hpp"
#include "offload/execution/update_coefficients.hpp"
#include "offload/storage/storage.hpp"
#include "scheduler/plan/plan.hpp"
#include "scheduler/tasks/task.hpp"

namespace tandem {

/// Tasks come one at a time, on the thread of the CPU lane; the engine's thread begins and closes.
class Speculation {
 public:
  /// All arguments must outlive the object.
  Speculation(UpdateKernels& kernels, const ParameterLayout& layout, const Plan& plan, const Storage& storage);

  /// The plan is another one. While nothing is in flight.
  void follow_plan();
  /// Updates of step `step` (`Task::step`) may run from now on, by these settings. `most_norm`: norm of the gradients as the
  /// caller made them from which on it is known that they will be taken back; empty: there is none. Returns false where
  /// updates by these settings cannot be taken back, and none will run.
  bool begin(const UpdateSettings& settings, std::int64_t step, std::optional<double> most_norm);
  /// None of the step that has not begun will run.
  void close() noexcept { open_step_ = -1; }

  /// Updates what of a subgroup can be taken back, unless it is too late. `piece`: the subgroup's operands.
  void speculate(const Task& task, const AdamPiece& piece);
  /// Makes of a subgroup, where some of it was updated, what its update by `actual` makes of it. Returns whether it was.
  bool settle(const Task& task, const AdamPiece& piece, const UpdateCoefficients& actual);
  /// Makes of a subgroup what it was.
  void retract(const Task& task, const AdamPiece& piece);

  /// Parameters that were updated in backward, padding included; elements of them that were taken back.
  std::uint64_t updated() const noexcept { return updated_; }
  std::uint64_t taken_back() const noexcept { return taken_back_; }

 private:
  std::int64_t& updated_of(const Task& task) { return updated_elements_[task.subgroup]; }
  UndoPiece undo_of(const Task& task, const AdamPiece& subgroup, const AdamPiece& part) const;
  bool exceeds(const Task& task);

  UpdateKernels& kernels_;
  const Plan& plan_;
  const Storage& storage_;
  UpdateCoefficients coefficients_;
  /// Updated elements of each subgroup, since it was settled or retracted.
  IndexedVector<SubgroupIndex, std::int64_t> updated_elements_;
  std::vector<AdamCoefficients> decided_;  ///< coefficients of a subgroup's parts, while it is settled
  std::atomic<std::int64_t> open_step_{-1};
  std::atomic<double> most_squares_{0.0};  ///< a step whose squares add up to more is clipped
  std::int64_t squares_step_ = -1;
  double squares_ = 0.0;  ///< sum of squares of the subgroups seen in that step
  std::atomic<std::uint64_t> updated_{0};
  std::atomic<std::uint64_t> taken_back_{0};
};

}  // namespace tandem
