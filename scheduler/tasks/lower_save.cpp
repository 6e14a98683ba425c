// A save among the tasks of a plan.
#include <algorithm>

#include "scheduler/plan/rank_slice.hpp"
#include "scheduler/tasks/lowering.hpp"

namespace tandem {
namespace {

// Nobody waits for a checkpoint: the disk has a lane of its own.
constexpr int priority_save = 3;

}  // namespace

void Lowering::save(TaskList& out) {
  for (const Parameter* p : layout_.owned_parameters()) save_parameter(*p, out);
}

/// One task after another, as the file is written: a task is also behind all that those before it wait for.
Task& Lowering::emit_save(const Parameter& p, StateArray array, std::int64_t begin, std::int64_t end, TaskList& out) {
  Task& task = emit(out, TaskKind::save_state, Lane::disk, priority_save, p.layer);
  task.begin = begin;
  task.end = end;
  task.array = array;
  task.bytes = static_cast<std::uint64_t>(task.count()) * sizeof(float);
  out.depends_on(last_save_);
  last_save_ = task.id;
  return task;
}

/// The three arrays follow each other in the file, so only while the last one is read is one subgroup after another
/// done with: it has a task for each, the others one alone.
void Lowering::save_parameter(const Parameter& p, TaskList& out) {
  const LayerSlice slice = slice_of(layout_.layer(p.layer), plan_.rank);
  const ElementRange& own = p.options.trainable ? slice.trained : slice.frozen;
  const std::int64_t begin = std::max(p.offset, own.begin);
  const std::int64_t end = std::min(p.offset + p.count, own.end);
  if (begin >= end) return;  // it is other ranks'
  if (!p.options.trainable) {
    emit_save(p, StateArray::master, begin, end, out);
    return;
  }
  const LayerState& layer = state_of(p.layer);
  const auto for_subgroups = [&](auto call) {
    for (int s = layer.first_subgroup; s < layer.first_subgroup + layer.subgroup_count; ++s) {
      const Subgroup& group = plan_.subgroups[static_cast<std::size_t>(s)];
      const std::int64_t from = std::max(begin, group.begin);
      const std::int64_t to = std::min(end, group.end);
      if (from < to) call(subgroups_[static_cast<std::size_t>(s)], group, from, to);
    }
  };
  emit_save(p, StateArray::master, begin, end, out);
  for_subgroups([&](SubgroupState& users, const Subgroup& group, std::int64_t, std::int64_t) {
    depend_on_users(users.state_users, group.begin, group.end, out);
  });
  emit_save(p, StateArray::m, begin, end, out);
  for_subgroups([&](SubgroupState& users, const Subgroup& group, std::int64_t from, std::int64_t to) {
    // Behind the users that there were, and so for the next update instead of them.
    const TaskId read = emit_save(p, StateArray::v, from, to, out).id;
    users.state_users = {{group.begin, group.end, read}};
  });
}

}  // namespace tandem
