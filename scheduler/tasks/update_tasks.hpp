#pragma once
// Updates: of subgroups on the CPU, and of pieces of them on the device.
#include <cstdint>
#include <span>
#include <vector>

#include "scheduler/tasks/lowering_state.hpp"
#include "scheduler/tasks/weight_ring.hpp"

namespace tandem {

/// Emits the updates of one layer after another, each behind who uses its gradients, state and old weights.
class UpdateTasks {
 public:
  /// Both arguments must outlive the object.
  UpdateTasks(LoweringState& state, WeightRing& weights);

  /// Emits the updates of all subgroups of a layer.
  void update_layer(LayerIndex layer, TaskList& out);
  /// Emits, behind the norm blocks of a layer's final gradient, those that may be taken back. The layer's weights on the
  /// host are then not to be read before it is updated or retracted.
  void speculate_layer(LayerIndex layer, std::span<const TaskId> norm_tasks, TaskList& out);
  /// Emits what takes them back: the layer's state and weights are then as they were.
  void retract_layer(LayerIndex layer, TaskList& out);

 private:
  /// Calls body(subgroup) for those of a layer that speculate.
  template <class Body>
  void for_speculating(LayerIndex layer, Body body) const;
  void emit_on_state(SubgroupIndex subgroup, TaskKind kind, TaskList& out);
  Task task_of(SubgroupIndex subgroup, std::int64_t begin, std::int64_t end) const;
  Task& emit(TaskList& out, TaskKind kind, Lane lane, const Task& piece);
  void update_on_cpu(SubgroupIndex subgroup, TaskList& out);
  void update_in_pieces(SubgroupIndex subgroup, TaskList& out);
  void update_piece_on_cpu(Task piece, TaskList& out);
  void update_piece_on_device(Task piece, TaskList& out);
  TaskId load_piece(const Task& piece, TaskId read, TaskList& out);
  void store_piece(const Task& piece, TaskId updated, TaskList& out);
  TaskId store(const Task& piece, TaskKind kind, std::uint64_t bytes, TaskId updated, TaskList& out);
  TaskId read_piece(Task& piece, TaskList& out);
  TaskId write_piece(const Task& piece, TaskId updated, TaskList& out);
  void push_weights(const Task& piece, TaskId updated, TaskList& out);
  StateFormat format_of(const Task& piece) const;
  void depend_on_users_before(const Task& piece, TaskList& out) const;

  LoweringState& state_;
  WeightRing& weights_;
  BufferCycle state_buffers_;  ///< on the device, of pieces of streamed state
  BufferCycle file_buffers_;   ///< on the host, of pieces of state that lives in the file
  // Users of the subgroup at work from before its update: each of its pieces waits for those of its own elements.
  std::vector<RangeUse> gradient_before_;
  std::vector<RangeUse> state_before_;
};

}  // namespace tandem
