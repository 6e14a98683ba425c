#include "scheduler/tasks/lowering_state.hpp"

namespace tandem {

void depend_on_users(const std::vector<RangeUse>& users, std::int64_t begin, std::int64_t end, TaskList& out) {
  const auto ends_before = [=](const RangeUse& use) { return use.end <= begin; };
  const auto first = std::partition_point(users.begin(), users.end(), ends_before);
  for (auto use = first; use != users.end() && use->begin < end; ++use) out.depends_on(use->task);
}

LoweringState::LoweringState(const ParameterLayout& of_layout, const Plan& of_plan, TaskCount begin)
    : layout(of_layout),
      plan(of_plan),
      next_id(begin.next_id),
      step(begin.steps - 1),
      touched(of_layout.layers().size()),
      subgroup_ranges(of_layout.layers().size()),
      subgroup_users(of_plan.subgroups.size()),
      speculated_layers(of_layout.layers().size()),
      staging(of_plan.staging_pieces) {
  for (int l = 0; l < layout.layer_count(); ++l) {
    at(touched, l).push_back(l);
    for (const int owner : layout.layer(l).borrows) at(touched, l).push_back(owner);
  }
  for (int s = 0; s < static_cast<int>(plan.subgroups.size()); ++s) {
    SubgroupRange& range = at(subgroup_ranges, subgroup(s).layer);
    if (range.empty()) range = {s, s};
    ++range.end;
  }
}

Task& LoweringState::emit(TaskList& out, TaskKind kind, Lane lane, int priority, int layer) {
  Task task;
  task.priority = priority;
  task.layer = layer;
  task.step = step;
  return emit_like(out, task, kind, lane);
}

Task& LoweringState::emit_like(TaskList& out, const Task& piece, TaskKind kind, Lane lane) {
  Task& task = out.add(piece);
  task.id = next_id++;
  task.kind = kind;
  task.lane = lane;
  return task;
}

}  // namespace tandem
