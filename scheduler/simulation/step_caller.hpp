#pragma once
// The caller in a simulated step: its thread, which walks through the layers, and its stream, which computes.
#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "core/params/parameter_layout.hpp"
#include "scheduler/plan/walk.hpp"
#include "scheduler/simulation/input_copies.hpp"
#include "scheduler/simulation/step_tasks.hpp"
#include "scheduler/tasks/lowering.hpp"

namespace tandem {

/// One piece of the caller's work on its stream.
struct Compute {
  std::vector<TaskId> begins;  ///< the caller's tasks whose dependencies its stream waits for
  std::vector<TaskId> ends;    ///< the caller's tasks that are done with it
  LayerIndex layer;
  bool backward = false;
  bool opens_pass = false;
  double seconds = 0.0;
  InputCopies::Part inputs{};
};

class StepCaller {
 public:
  /// All but the accumulations must outlive it. The step has the micro-batches of `walked`, which stand for those of
  /// `whole`.
  StepCaller(const ParameterLayout& layout, const Plan& plan, const CostModel& costs,
             std::span<const LayerSeconds> compute, const Accumulation& walked, const Accumulation& whole,
             Lowering& lowering, StepTasks& tasks);

  /// Walks a step of one micro-batch without time, so that buffers hold what they do in the steady state: no more is
  /// left of a step whose tasks are done. Returns the id of the next task.
  TaskId warm_up();
  void begin_step();
  /// The step has ended: the next one is walked from its beginning.
  void rewind() noexcept {
    action_ = 0;
    compute_left_ = compute_of_step_;
  }
  /// The caller's thread costs no time of its own: it goes on until it has to wait. Returns whether it did.
  bool advance();
  /// Nothing is left to do, by its thread or on its stream.
  bool finished() const { return action_ == walk_.size() && computes_.empty(); }

  // The caller's stream, which begins what its thread has queued, one after another.
  bool may_compute() const { return !computes_.empty() && may_run(computes_.front()); }
  const Compute& next() const { return computes_.front(); }
  Compute end_compute();
  InputCopies& inputs() noexcept { return inputs_; }
  /// Seconds left of the stream's work, if it ran alone.
  double seconds_left() const noexcept { return compute_left_; }

  /// Passes behind the one that its thread is in or before, without the last, behind which there is no other.
  std::int64_t passes_to_skip() const;
  /// Skips passes, as if so many had gone by.
  void skip(std::int64_t passes);
  /// Seconds that a step takes at least, from the beginning of its updates: a layer's forward waits for the updates of
  /// all before it and its own, which take at least as long as what they use most.
  double least_seconds(const TaskList& updates) const;

 private:
  bool act(const Action& action);
  const LayerSeconds& compute_of(LayerIndex layer) const { return compute_[layer.position()]; }
  double seconds_of(const Action& action) const;
  double seconds_of(std::span<const Action> actions) const;
  void queue_compute(const Action& action, bool backward);
  InputCopies::Part inputs_of(const Action& action, bool backward);
  void end_with_last_compute(TaskId id);
  void commit_again(const Action& action);
  bool may_begin(TaskId id);
  bool may_run(const Compute& compute) const;

  const ParameterLayout& layout_;
  const Plan& plan_;
  const CostModel& costs_;
  std::span<const LayerSeconds> compute_;
  const Accumulation walked_;
  const Walk walk_;
  Lowering& lowering_;
  StepTasks& tasks_;
  TaskGraph& graph_;

  std::int64_t action_ = 0;
  bool blocked_ = false;       ///< waits in the middle of `walk_[action_]`
  TaskId begins_ = no_task;    ///< the caller's task that its thread wants to begin
  std::vector<TaskId> begun_;  ///< caller's tasks that its thread has begun since its last compute
  double zero_seconds_ = 0.0;  ///< seconds to zero fresh gradient buffers, before the next compute
  LayerUse use_;
  GradientUse gradients_;
  std::deque<Compute> computes_;
  InputCopies inputs_;
  const double compute_of_step_;  ///< seconds of its stream, alone
  double compute_left_;
};

}  // namespace tandem
