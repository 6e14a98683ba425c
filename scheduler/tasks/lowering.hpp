#pragma once
// Lowers a plan into tasks as the caller walks through its layers. Holds which layer lies in which
// buffer and which task last touched what, so that every hazard becomes a dependency. Pure bookkeeping:
// no threads, no bytes, no time. The executor and the simulator drive the same code.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/params/parameter_access.hpp"
#include "core/params/parameter_layout.hpp"
#include "scheduler/plan/plan.hpp"
#include "scheduler/tasks/task.hpp"

namespace tandem {

/// Where the weights of one layer lie for a use: `buffer` indexes all weight buffers, -1: resident.
struct WeightPlace {
  int layer = -1;
  int buffer = -1;
};

/// Where a layer's gradient lies. `fresh`: the caller's stream must first zero what is to be added to.
struct GradientPlace {
  int layer = -1;
  int buffer = -1;
  bool fresh = false;
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

/// ... and of its gradients in one micro-batch.
struct GradientUse {
  TaskId id = no_task;
  int layer = -1;
  int micro = 0;
  Places<GradientPlace> gradients;  ///< layers without state are left out
};

/// What tasks are numbered by; goes on where one plan follows another.
struct TaskCount {
  TaskId next_id = 0;
  std::int64_t steps = 0;  ///< begun so far
};

/// A layer whose gradient of the step is complete.
struct CompleteLayer {
  int layer = 0;
  std::size_t norm_tasks_end = 0;  ///< its own among `Lowering::norm_tasks` begin where those of the one before end
};

/// Calls that emit append to `out`, in an order in which every dependency comes before its dependents.
class Lowering {
 public:
  /// Both must outlive it.
  Lowering(const ParameterLayout& layout, const Plan& plan, TaskCount begin = {});
  TaskCount count() const noexcept { return {next_id_, step_ + 1}; }

  /// `update_in_backward`: a layer's updates follow as soon as its gradient is complete, and `update` has
  /// nothing left to do.
  void begin_step(int micro_batches, bool update_in_backward = false);
  /// The step has so many micro-batches fewer than it began with: whole passes, none of them begun, and not the last.
  void leave_out(int micro_batches) noexcept { micro_batches_ -= micro_batches; }
  void begin_evaluation();
  /// Forgets an open step's or evaluation's place; buffers stay as they are.
  void end_pass();

  /// The caller is about to use a layer. Throws MisuseError when every buffer that could hold it is held
  /// by a use that has not been released.
  LayerUse use(int layer, TaskList& out);
  /// The caller's work of a use has been queued.
  void release(const LayerUse& use);
  /// Fetches what comes next into buffers that nobody holds.
  void prefetch(TaskList& out);

  /// The caller is about to fill a layer's gradients: emits the commit with which it will end. The layer's k-th
  /// call in a step is of micro-batch k. Throws MisuseError before the layer's last one is committed, beyond the
  /// micro-batches that pass through the layers at once, and, where the plan sends sums, before all micro-batches of
  /// the layer before are committed.
  GradientUse gradients(int layer, TaskList& out);
  /// It has: emits, for every layer that is now complete, the way of its gradient.
  void commit(const GradientUse& use, TaskList& out);
  /// It has not, and will not: the buffers may be reused after the use's task, a commit of nothing.
  void abandon(const GradientUse& use);
  /// Whether every layer with state has been committed in every micro-batch.
  bool gradients_complete() const noexcept;
  /// Emits the updates of all subgroups in forward order.
  void update(TaskList& out);
  /// Between steps: emits the reading of all state as it is behind the updates emitted so far, in the order of a
  /// checkpoint, one task after another. The next update of a subgroup waits until its state has been read.
  void save(TaskList& out);
  /// Steps begun before the present one: `Task::step`.
  std::int64_t step() const noexcept { return step_; }
  /// The tasks after which the norm blocks of the present step lie on the host, a layer's behind those of the layer
  /// that was complete before it.
  const std::vector<TaskId>& norm_tasks() const noexcept { return norm_tasks_; }
  /// In the order in which they came.
  const std::vector<CompleteLayer>& complete_layers() const noexcept { return complete_layers_; }

  /// Weights have changed by other means than updates: every buffer must be fetched again. Throws
  /// MisuseError while a use is not released.
  void invalidate_weights();
  /// Every task before `id` is done: it is no longer named as a dependency. Keeps the lists short.
  void forget_before(TaskId id);

  /// Visits not yet released, counted over buffers and residents.
  int open_visits() const noexcept { return open_visits_; }
  int weight_buffer_count() const noexcept { return static_cast<int>(weight_buffers_.size()); }
  int sum_buffer_count() const noexcept { return static_cast<int>(sum_buffers_.size()); }
  int gradient_buffer_count() const noexcept { return static_cast<int>(gradient_buffers_.size()); }
  /// Elements of a buffer.
  std::int64_t weight_buffer_elements(int buffer) const;
  std::int64_t gradient_buffer_elements(int buffer) const;

 private:
  struct WeightBuffer {
    int size_class = 0;
    int layer = -1;   ///< what it holds; -1 nothing valid
    int holders = 0;  ///< uses not yet released
    TaskId filled_by = no_task;
    std::vector<TaskId> users;  ///< to wait for before it is overwritten
  };
  /// Open while it holds a layer's gradient of one micro-batch, from the first that adds to it to the last. A layer
  /// that others borrow from may have several open: all of a borrower's micro-batches can come before its own.
  struct GradientBuffer {
    int size_class = 0;
    int layer = -1;  ///< -1: not open
    int micro = 0;
    int commits = 0;                   ///< of the layers that add to it
    std::vector<TaskId> commit_tasks;  ///< theirs
    std::vector<TaskId> users;         ///< to wait for before it is overwritten
  };
  /// A task that uses elements [begin, end) of something.
  struct Use {
    std::int64_t begin = 0;
    std::int64_t end = 0;
    TaskId task = no_task;
  };
  /// Holds what other ranks send of one layer's gradient of one micro-batch.
  struct ReceiveBuffer {
    int size_class = 0;
    std::vector<TaskId> filled_by;  ///< one task, none at first
    std::vector<TaskId> users;      ///< to wait for before it is overwritten
  };
  /// Holds the sum of a layer's gradients from its first micro-batch to its last.
  struct SumBuffer {
    int size_class = 0;
    int layer = -1;          ///< -1: free
    std::vector<Use> users;  ///< the last of each range, by range
  };
  struct LayerState {
    int weight_buffer = -1;          ///< that holds valid weights, -1 none
    int asked = 0;                   ///< micro-batches in which the caller has asked for gradients here
    int committed = 0;               ///< ... and committed them
    int contributors = 1;            ///< layers that must commit: itself and its borrowers
    bool used_in_backward = false;   ///< of the present step
    bool needed_in_backward = true;  ///< false: its gradients came without its weights in the last step that had any
    std::vector<int> touched;        ///< layers that a use needs: itself and those it borrows from
    std::vector<int> touchers;       ///< layers whose use needs this layer's weights
    std::vector<TaskId> weight_writers;  ///< of the place that fetches or uses read
    bool stale = false;                  ///< resident, and other ranks have newer weights of their slices than this one
    std::vector<TaskId> stale_readers;   ///< of what they will overwrite
    std::vector<TaskId> uses;            ///< readers since the last update: uses where resident, else fetches
    int first_subgroup = 0;
    int subgroup_count = 0;
  };
  /// The last users, neither beginnings nor ends of their ranges falling: those that they wait for themselves are left
  /// out.
  struct SubgroupState {
    std::vector<Use> gradient_users;  ///< tasks that read or write the final gradient
    std::vector<Use> state_users;
  };

  LayerState& state_of(int layer) { return layers_[static_cast<std::size_t>(layer)]; }
  Task& emit(TaskList& out, TaskKind kind, Lane lane, int priority, int layer);
  int acquire_weight_buffer(int layer, bool only_idle, TaskList& out);
  void load(int layer, int buffer, TaskList& out);
  TaskId gather(int layer, int buffer, TaskList& out);
  void gather_resident(int layer, TaskList& out);
  void prefetch_resident(TaskList& out);
  void require_next_micro_batch(int layer) const;
  int open_gradient(int layer, int micro) const noexcept;
  int acquire_gradient_buffer(int layer, int micro);
  void open_gradients(GradientUse& use);
  void send_gradient(int buffer, TaskList& out);
  int all_to_all(int buffer, TaskList& out);
  int acquire_receive_buffer(int layer) const;
  void send_part(Task piece, TaskList& out);
  const std::vector<TaskId>& fillers_of(const Task& piece) const;
  std::vector<TaskId>& users_of(const Task& piece);
  int gradients_of_step() const noexcept { return micro_batches_ * plan_.rank.count; }
  Task& emit_like(TaskList& out, const Task& piece, TaskKind kind, Lane lane);
  int sum_buffer_of(int layer);
  TaskId add_piece(Task& piece, TaskList& out);
  static void replace_uses(std::vector<Use>& users, std::vector<Use>::iterator first, std::vector<Use>::iterator last,
                           const Use& use);
  void stage_piece(Task& piece, bool adds, TaskList& out);
  void send_piece(Task piece, TaskList& out);
  void keep_piece(const Task& piece, TaskList& out);
  void save_parameter(const Parameter& parameter, TaskList& out);
  Task& emit_save(const Parameter& parameter, StateArray array, std::int64_t begin, std::int64_t end, TaskList& out);
  void update_layer(int layer, TaskList& out);
  Task update_of(int subgroup, std::int64_t begin, std::int64_t end) const;
  Task& emit_update(TaskList& out, TaskKind kind, Lane lane, const Task& piece);
  void update_on_cpu(int subgroup, TaskList& out);
  void update_in_pieces(int subgroup, TaskList& out);
  void update_piece_on_cpu(Task piece, TaskList& out);
  void update_piece_on_device(Task piece, TaskList& out);
  TaskId read_piece(Task& piece, TaskList& out);
  TaskId write_piece(const Task& piece, TaskId updated, TaskList& out);
  void push_weights(const Task& piece, TaskId updated, TaskList& out);
  /// The last task depends on those of `users` that use some of [begin, end).
  static void depend_on_users(const std::vector<Use>& users, std::int64_t begin, std::int64_t end, TaskList& out);
  void open_micro_batches(int first);
  int distance_to(int layer) const noexcept;
  int steps_until(int layer) const noexcept;
  int take_staging() noexcept;
  int take_state_buffer() noexcept;
  int take_file_buffer() noexcept;
  /// Calls body(begin, end) for each piece of a subgroup. What crosses the link, or waits in a buffer of a piece, goes
  /// piece by piece, so that neighbours overlap; what stays on the device is `whole`, since on a GPU a task of one
  /// piece takes less time than to learn that it has ended.
  template <class Body>
  void for_pieces(const Subgroup& group, bool whole, Body body) const {
    const std::int64_t piece = whole ? group.count() : plan_.piece_elements;
    for (std::int64_t begin = group.begin; begin < group.end; begin += piece) {
      body(begin, std::min(begin + piece, group.end));
    }
  }

  /// Of its update.
  template <class Body>
  void for_update_pieces(int subgroup, Body body) const {
    const Subgroup& group = plan_.subgroups[static_cast<std::size_t>(subgroup)];
    const bool stays = group.tier == Tier::device && plan_.layers[static_cast<std::size_t>(group.layer)].resident;
    for_pieces(group, stays, body);
  }

  /// Of its gradient: in no piece does fp32 meet bf16.
  template <class Body>
  void for_gradient_pieces(int subgroup, Body body) const {
    const Subgroup& group = plan_.subgroups[static_cast<std::size_t>(subgroup)];
    const std::int64_t border = layout_.layer(group.layer).summed_elements;
    for_pieces(group, group.gradient_on_device, [&](std::int64_t begin, std::int64_t end) {
      const bool crossed = begin < border && border < end;
      if (crossed) body(begin, border);
      body(crossed ? border : begin, end);
    });
  }

  enum class Direction : std::uint8_t { none, forward, backward, evaluation };

  const ParameterLayout& layout_;
  const Plan& plan_;
  TaskId next_id_;
  std::vector<WeightBuffer> weight_buffers_;
  std::vector<GradientBuffer> gradient_buffers_;
  std::vector<ReceiveBuffer> receive_buffers_;
  std::vector<SumBuffer> sum_buffers_;
  std::vector<LayerState> layers_;
  std::vector<SubgroupState> subgroups_;
  std::vector<TaskId> staging_users_;       ///< the last one of each piece, no_task at first
  std::vector<TaskId> state_buffer_users_;  ///< ... of each buffer
  std::vector<TaskId> file_buffer_users_;
  int next_staging_ = 0;
  int next_state_buffer_ = 0;
  int next_file_buffer_ = 0;
  Direction direction_ = Direction::none;
  int position_ = -1;  ///< layer used last
  std::int64_t step_;
  bool update_in_backward_ = false;
  std::vector<TaskId> norm_tasks_;
  std::vector<CompleteLayer> complete_layers_;
  TaskId last_save_ = no_task;
  int micro_batches_ = 1;
  int micro_end_ = 1;       ///< of those that pass through the layers at the moment, the last one's successor
  int layer_at_work_ = -1;  ///< whose gradients were asked for last
  int layers_to_commit_ = 0;
  int gradients_left_ = 0;  ///< of these layers in these micro-batches
  int open_visits_ = 0;
  std::vector<TaskId> before_;  ///< what the next tasks depend on, while they are emitted
  /// The same of pieces of a subgroup: each waits for the users of its own elements.
  std::vector<Use> gradient_before_, state_before_;
};

}  // namespace tandem
