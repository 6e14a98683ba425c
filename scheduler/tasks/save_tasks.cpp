#include "scheduler/tasks/save_tasks.hpp"

#include <algorithm>
#include <span>

#include "scheduler/plan/rank_slice.hpp"

namespace tandem {
namespace {

// Nobody waits for a checkpoint: the disk has a lane of its own.
constexpr int priority_save = 3;

}  // namespace

void SaveTasks::save(TaskList& out) {
  for (const Parameter* p : state_.layout.owned_parameters()) save_parameter(*p, out);
}

/// One task after another, as the file is written: a task is also behind all that those before it wait for.
TaskId SaveTasks::emit(const Parameter& p, StateArray array, std::int64_t begin, std::int64_t end, TaskList& out) {
  Task& task = state_.emit(out, TaskKind::save_state, Lane::disk, priority_save, layer_of(p));
  task.begin = begin;
  task.end = end;
  task.array = array;
  task.bytes = static_cast<std::uint64_t>(task.count()) * sizeof(float);
  out.depends_on(last_);
  last_ = task.id;
  return task.id;
}

void SaveTasks::save_parameter(const Parameter& p, TaskList& out) {
  const LayerSlice slice = slice_of(state_.layer(layer_of(p)), state_.plan.rank);
  const ElementRange& own = p.options.trainable ? slice.trained : slice.frozen;
  const std::int64_t begin = std::max(p.offset, own.begin);
  const std::int64_t end = std::min(p.offset + p.count, own.end);
  if (begin >= end) return;  // it is other ranks'
  if (p.options.trainable) {
    save_trained(p, begin, end, out);
  } else {
    emit(p, StateArray::master, begin, end, out);
  }
}

/// The arrays follow each other in the file, so only while the last one is read is one subgroup after another
/// done with: it has a task for each, the others one alone.
void SaveTasks::save_trained(const Parameter& p, std::int64_t begin, std::int64_t end, TaskList& out) {
  const auto for_subgroups = [&](auto call) {
    for (const SubgroupIndex s : state_.subgroups_of(layer_of(p))) {
      const Subgroup& group = state_.subgroup(s);
      const std::int64_t from = std::max(begin, group.begin);
      const std::int64_t to = std::min(end, group.end);
      if (from < to) call(state_.users(s).of_state, group, from, to);
    }
  };
  const std::span<const StateArray> arrays = arrays_of(/*trainable=*/true, optimizer_of(state_.plan.state));
  emit(p, arrays.front(), begin, end, out);
  for_subgroups([&](const std::vector<RangeUse>& users, const Subgroup& group, std::int64_t, std::int64_t) {
    depend_on_users(users, group.begin, group.end, out);
  });
  for (const StateArray array : arrays.subspan(1, arrays.size() - 2)) emit(p, array, begin, end, out);
  for_subgroups([&](std::vector<RangeUse>& users, const Subgroup& group, std::int64_t from, std::int64_t to) {
    // Behind the users that there were, and so for the next update instead of them.
    users = {{group.begin, group.end, emit(p, arrays.back(), from, to, out)}};
  });
}

}  // namespace tandem
