#pragma once
// Shared state of the parts of one lowering: ids of tasks, users of subgroups, and buffers that are taken in turn.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/base/index.hpp"
#include "core/params/parameter_layout.hpp"
#include "scheduler/plan/indices.hpp"
#include "scheduler/plan/plan.hpp"
#include "scheduler/tasks/task.hpp"

namespace tandem {

// Priorities: tasks that somebody waits for right now come first, then gradients (they free buffers that backward
// needs), then updates: the layer is added to `priority_update`, as the next forward waits for low layers first.
constexpr int priority_fetch = 0;
constexpr int priority_gradient = 1;
constexpr int priority_update = 2;

inline void append(std::vector<TaskId>& to, const std::vector<TaskId>& from) {
  to.insert(to.end(), from.begin(), from.end());
}

/// Tasks before `id` are no longer named as dependencies.
inline void erase_before(std::vector<TaskId>& tasks, TaskId id) {
  std::erase_if(tasks, [id](TaskId task) { return task < id; });
}

/// The item with an index that is known to be valid: of buffers and size classes.
template <class Items>
auto& at(Items& items, int index) {
  return items[static_cast<std::size_t>(index)];
}

/// Counters that number tasks; they go on where one plan follows another.
struct TaskCount {
  TaskId next_id{0};
  std::int64_t steps = 0;  ///< steps begun so far
};

/// A task that uses elements [begin, end) of something.
struct RangeUse {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  TaskId task = no_task;
};

/// The last task of `out` depends on those of `users` that use some of [begin, end). Neither beginnings nor ends of
/// their ranges fall.
void depend_on_users(const std::vector<RangeUse>& users, std::int64_t begin, std::int64_t end, TaskList& out);

/// The last users, neither beginnings nor ends of their ranges falling: those that they wait for themselves are left
/// out.
struct SubgroupUsers {
  std::vector<RangeUse> of_gradient;  ///< tasks that read or write the final gradient
  std::vector<RangeUse> of_state;
};

/// Buffers of one kind that are taken in turn, with the last task that uses each.
class BufferCycle {
 public:
  explicit BufferCycle(int count) : users_(static_cast<std::size_t>(count), no_task) {}
  /// The index of the next one. There must be some.
  int take() noexcept {
    const int taken = next_;
    next_ = (next_ + 1) % static_cast<int>(users_.size());
    return taken;
  }
  /// `no_task` at first.
  TaskId& user(int buffer) { return at(users_, buffer); }

 private:
  std::vector<TaskId> users_;
  int next_ = 0;
};

/// Shared by the parts of a lowering, each of which emits its tasks by way of it.
struct LoweringState {
  /// Both `of_layout` and `of_plan` must outlive the object.
  LoweringState(const ParameterLayout& of_layout, const Plan& of_plan, TaskCount begin);

  /// Appends a task of the present step.
  Task& emit(TaskList& out, TaskKind kind, Lane lane, int priority, LayerIndex of);
  /// Appends a task with all else as `piece` has it.
  Task& emit_like(TaskList& out, const Task& piece, TaskKind kind, Lane lane) {
    Task& task = out.add(piece);
    task.id = next_id++;
    task.kind = kind;
    task.lane = lane;
    return task;
  }

  const Layer& layer(LayerIndex index) const { return layer_at(layout, index); }
  LayerIndex last_layer() const noexcept { return LayerIndex(layout.layer_count() - 1); }
  const Subgroup& subgroup(SubgroupIndex index) const { return subgroup_at(plan, index); }
  const LayerPlacement& placement(LayerIndex index) const { return placement_at(plan, index); }
  bool adds_to(LayerIndex owner, LayerIndex of) const noexcept { return plan.adds_to(owner.number(), of.number()); }
  SubgroupUsers& users(SubgroupIndex index) { return subgroup_users[index]; }
  const IndexRange<SubgroupIndex>& subgroups_of(LayerIndex index) const { return subgroup_ranges[index]; }
  const std::vector<LayerIndex>& touched_by(LayerIndex index) const { return touched[index]; }
  /// Whether some of a layer's updates have been emitted that may be taken back, and nothing that decides about them.
  bool speculated(LayerIndex index) const { return speculated_layers[index] != 0; }
  void set_speculated(LayerIndex index, bool is) { speculated_layers[index] = is ? 1 : 0; }

  const ParameterLayout& layout;
  const Plan& plan;
  TaskId next_id;
  std::int64_t step;  ///< begun before the present one
  /// Layers that a use of each needs, itself first.
  IndexedVector<LayerIndex, std::vector<LayerIndex>> touched;
  IndexedVector<LayerIndex, IndexRange<SubgroupIndex>> subgroup_ranges;  ///< subgroups of each layer
  IndexedVector<SubgroupIndex, SubgroupUsers> subgroup_users;
  IndexedVector<LayerIndex, unsigned char> speculated_layers;
  BufferCycle staging;  ///< pieces on the device, on their way from or to the host
};

/// Calls body(begin, end) for each piece of a subgroup. What crosses the link, or waits in a buffer of a piece, goes
/// piece by piece, so that neighbours overlap; what stays on the device is `whole`, since on a GPU a task of one
/// piece takes less time than to learn that it has ended.
template <class Body>
void for_pieces(const Plan& plan, const Subgroup& group, bool whole, Body body) {
  const std::int64_t piece = whole ? group.count() : plan.piece_of(group);
  for (std::int64_t begin = group.begin; begin < group.end; begin += piece) {
    body(begin, std::min(begin + piece, group.end));
  }
}

}  // namespace tandem
