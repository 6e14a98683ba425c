#pragma once
// Lowers a plan into tasks as the caller walks through its layers. Holds which layer lies in which
// buffer and which task last touched what, so that every hazard becomes a dependency. Pure bookkeeping:
// no threads, no bytes, no time. The executor and the simulator drive the same code.
#include <cstdint>
#include <string>
#include <vector>

#include "core/params/parameter_access.hpp"
#include "core/params/parameter_layout.hpp"
#include "scheduler/plan/plan.hpp"
#include "scheduler/tasks/gradient_path.hpp"
#include "scheduler/tasks/layer_use.hpp"
#include "scheduler/tasks/lowering_state.hpp"
#include "scheduler/tasks/save_tasks.hpp"
#include "scheduler/tasks/task.hpp"
#include "scheduler/tasks/update_tasks.hpp"
#include "scheduler/tasks/weight_ring.hpp"

namespace tandem {

/// Time of a step's updates.
enum class UpdateTime : std::uint8_t {
  after_norm,  ///< when `update` is called
  in_backward, ///< as soon as a layer's gradient is complete; `update` has nothing left to do
  speculative, ///< some in backward, which `update` decides about, or `retract`
};

/// Calls that emit append to `out`, in an order in which every dependency comes before its dependents.
class Lowering {
 public:
  /// Both `layout` and `plan` must outlive the object.
  Lowering(const ParameterLayout& layout, const Plan& plan, TaskCount begin = {});
  Lowering(const Lowering&) = delete;
  Lowering& operator=(const Lowering&) = delete;
  TaskCount count() const noexcept { return {state_.next_id, state_.step + 1}; }

  void begin_step(const StepExtent& extent, UpdateTime update_time = UpdateTime::after_norm);
  /// The step has so many micro-batches fewer than it began with: whole passes, none of them begun, and not the last.
  void leave_out(int micro_batches) noexcept { gradients_.leave_out(micro_batches); }
  /// The micro-batch before is over, also for layers that have not committed in it. `last`: none follows this one. The
  /// caller is still in it where it has asked for no gradients yet. Throws MisuseError where layers are missing that
  /// may not be, and beyond the step's micro-batches. Not with several micro-batches at once.
  void begin_micro_batch(bool last, TaskList& out);
  /// The caller commits no more gradients of this step: makes those final that are not yet.
  void end_gradients(Missing missing, TaskList& out);
  void begin_evaluation();
  /// Forgets an open step's or evaluation's place; buffers stay as they are.
  void end_pass();

  /// The caller is about to use a layer. Speculative updates of what it needs are taken back before. Throws MisuseError
  /// when every buffer that could hold it is held by a use that has not been released.
  LayerUse use(LayerIndex layer, TaskList& out);
  /// Uses a layer that stays on the device, also outside a step.
  LayerUse use_resident(LayerIndex layer, TaskList& out) { return weights_.use_resident(layer, out); }
  /// The caller's work of a use has been queued.
  void release(const LayerUse& use) { weights_.release(use); }
  /// Forgets what the weight buffers of a released use hold, unless another use still does: returns their places, which
  /// the caller's stream may write until the use's task is done.
  std::vector<WeightPlace> drop_idle(const LayerUse& use) { return weights_.drop_idle(use); }
  /// Fetches what comes next into buffers that nobody holds.
  void prefetch(TaskList& out) { weights_.prefetch(out); }

  /// The caller is about to fill a layer's gradients: emits the commit with which it will end. The layer's k-th
  /// call in a step is of micro-batch k. Throws MisuseError before the layer's last one is committed, beyond the
  /// micro-batches that pass through the layers at once, and, where the plan sends sums, before all micro-batches of
  /// the layer before are committed.
  GradientUse gradients(LayerIndex layer, TaskList& out);
  /// The caller has filled the gradients of a use: emits, for every layer that is now complete, the way of its
  /// gradient.
  void commit(const GradientUse& use, TaskList& out);
  /// The caller will not fill the gradients of a use: the buffers may be reused after the use's task, a commit of
  /// nothing.
  void abandon(const GradientUse& use) { gradients_.abandon(use); }
  /// Empty where the step's gradients may end; else what is missing, in words.
  std::string missing_gradients() const { return gradients_.missing(); }
  bool gradients_complete() const { return missing_gradients().empty(); }
  /// Whether the step has a final gradient of a layer.
  bool has_gradient(LayerIndex layer) const noexcept { return gradients_.has_gradient(layer); }
  /// Emits the updates of all layers with a gradient in forward order.
  void update(TaskList& out);
  /// Emits what takes all speculative updates of the step back. Nothing where there are none.
  void retract(TaskList& out);
  /// Emits, between steps, the reading of all state as it is behind the updates emitted so far, in the order of a
  /// checkpoint, one task after another. The next update of a subgroup waits until its state has been read.
  void save(TaskList& out) { saves_.save(out); }
  /// Steps begun before the present one: `Task::step`.
  std::int64_t step() const noexcept { return state_.step; }
  /// The tasks after which the norm blocks of the present step lie on the host, a layer's behind those of the layer
  /// that was complete before it.
  const std::vector<TaskId>& norm_tasks() const noexcept { return gradients_.norm_tasks(); }
  /// Layers whose gradient is complete, in the order in which they came.
  const std::vector<CompleteLayer>& complete_layers() const noexcept { return gradients_.complete_layers(); }

  /// Weights have changed by other means than updates: every buffer must be fetched again. Throws
  /// MisuseError while a use is not released.
  void invalidate_weights() { weights_.invalidate_weights(); }
  /// Every task before `id` is done: it is no longer named as a dependency. Keeps the lists short.
  void forget_before(TaskId id);

  int weight_buffer_count() const noexcept { return weights_.buffer_count(); }
  int sum_buffer_count() const noexcept { return gradients_.sum_buffer_count(); }
  int gradient_buffer_count() const noexcept { return gradients_.buffer_count(); }
  /// Elements of a buffer.
  std::int64_t gradient_buffer_elements(int buffer) const { return gradients_.buffer_elements(buffer); }

 private:
  void update_complete(TaskList& out);
  void begin_update(const CompleteLayer& complete, TaskList& out);

  LoweringState state_;  // before its users
  WeightRing weights_;
  GradientPath gradients_;
  UpdateTasks updates_;
  SaveTasks saves_;
  UpdateTime update_time_ = UpdateTime::after_norm;
  std::size_t updated_layers_ = 0;    ///< number of `complete_layers` whose updates have begun in backward
  std::size_t norm_tasks_begin_ = 0;  ///< norm tasks of these
};

}  // namespace tandem
