#pragma once
// The way of gradients: from the buffers that the caller fills to where their update finds them.
#include <cstdint>
#include <string>
#include <vector>

#include "scheduler/tasks/layer_use.hpp"
#include "scheduler/tasks/lowering_state.hpp"
#include "scheduler/tasks/step_commits.hpp"
#include "scheduler/tasks/sum_buffers.hpp"

namespace tandem {

/// A layer whose gradient of the step is complete.
struct CompleteLayer {
  LayerIndex layer;
  std::size_t norm_tasks_end = 0;  ///< its own among `Lowering::norm_tasks` begin where those of the one before end
};

/// Treatment of layers that have no gradient in a whole step.
enum class Missing : std::uint8_t {
  left,   ///< they stay as they are
  zeros,  ///< their gradient is zero
};

/// Gradient buffers, what other ranks send, sums, and the final gradients. Part of a `Lowering`, whose members of the
/// same names say what these do.
class GradientPath {
 public:
  /// The state must outlive it.
  explicit GradientPath(LoweringState& state);

  void begin_step(const StepExtent& extent);
  void leave_out(int micro_batches) noexcept { commits_.leave_out(micro_batches); }
  void begin_micro_batch(bool last, TaskList& out);
  void end_step(Missing missing, TaskList& out);

  GradientUse gradients(LayerIndex layer, TaskList& out);
  /// Counts a use of a layer with gradients whose buffers the caller has filled.
  void count_commit(const GradientUse& use) { commits_.commit(use.layer); }
  /// Commits one place of such a use. Emits the gradient's way if all layers have been added to it.
  void commit(const GradientUse& use, const GradientPlace& place, TaskList& out);
  /// Goes on to the next pass where all gradients of the present one are committed, and it is not the last. Returns
  /// whether it did.
  bool next_pass() { return commits_.next_pass(); }
  void abandon(const GradientUse& use);
  std::string missing() const { return commits_.missing(); }
  bool has_gradient(LayerIndex layer) const noexcept { return commits_.is_final(layer); }

  const std::vector<TaskId>& norm_tasks() const noexcept { return norm_tasks_; }
  const std::vector<CompleteLayer>& complete_layers() const noexcept { return complete_layers_; }
  void forget_before(TaskId id);
  int buffer_count() const noexcept { return static_cast<int>(buffers_.size()); }
  int sum_buffer_count() const noexcept { return sums_.count(); }
  std::int64_t buffer_elements(int buffer) const;

 private:
  /// Open while it holds a layer's gradient of one micro-batch, from the first that adds to it to the last. A layer
  /// that others borrow from may have several open: all of a borrower's micro-batches can come before its own.
  struct Buffer {
    int size_class = 0;
    LayerIndex layer;  ///< none: not open
    int micro = 0;
    int commits = 0;                   ///< commits so far, of the layers that add to it
    std::vector<TaskId> commit_tasks;  ///< theirs
    std::vector<TaskId> users;         ///< to wait for before it is overwritten
  };
  /// Holds what other ranks send of one layer's gradient of one micro-batch.
  struct ReceiveBuffer {
    int size_class = 0;
    std::vector<TaskId> filled_by;  ///< one task, none at first
    std::vector<TaskId> users;      ///< to wait for before it is overwritten
  };

  void close_buffers(TaskList& out);
  void finish(LayerIndex layer, TaskList& out);
  void finish_subgroup(Task piece, TaskList& out);
  void complete(LayerIndex layer) {
    commits_.set_final(layer);
    complete_layers_.push_back({layer, norm_tasks_.size()});
  }
  int open_buffer(LayerIndex layer, int micro) const noexcept;
  int acquire_buffer(LayerIndex layer, int micro);
  std::string open_layers(int size_class) const;
  void open_gradients(GradientUse& use);
  void send_gradient(int buffer, TaskList& out);
  int all_to_all(int buffer, TaskList& out);
  int acquire_receive_buffer(LayerIndex layer) const;
  void send_part(Task piece, TaskList& out);
  const std::vector<TaskId>& fillers_of(const Task& piece) const;
  std::vector<TaskId>& users_of(const Task& piece);
  int gradients_of_step() const noexcept { return commits_.micro_batches() * state_.plan.rank.count; }
  void stage_piece(Task& piece, bool adds, TaskList& out);
  void send_piece(Task piece, TaskList& out);
  void send_norm(Task piece, TaskList& out);
  void keep_piece(const Task& piece, TaskList& out);
  void fetch_kept_norm(const Task& piece, TaskId made, TaskList& out);
  template <class Body>
  void for_gradient_pieces(SubgroupIndex subgroup, Body body) const;

  LoweringState& state_;
  StepCommits commits_;
  SumBuffers sums_;
  std::vector<Buffer> buffers_;
  std::vector<ReceiveBuffer> receive_buffers_;
  std::vector<TaskId> norm_tasks_;
  std::vector<CompleteLayer> complete_layers_;
  std::vector<TaskId> norm_makers_;     ///< tasks that make norm blocks of a subgroup, while its pieces are emitted
  std::vector<TaskId> before_;          ///< dependencies of the next commit, while it is emitted
  std::vector<RangeUse> final_before_;  ///< users of a subgroup's final gradient, while its next pieces are emitted
};

}  // namespace tandem
