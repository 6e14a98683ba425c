#include "scheduler/tasks/lowering_state.hpp"

namespace tandem {

void depend_on_users(const std::vector<RangeUse>& users, std::int64_t begin, std::int64_t end, TaskList& out) {
  constexpr std::size_t few = 4;  // a list that is read in less time than it is searched
  const auto ends_before = [=](const RangeUse& use) { return use.end <= begin; };
  auto use = users.begin();
  if (users.size() > few) use = std::partition_point(users.begin(), users.end(), ends_before);
  for (; use != users.end() && use->begin < end; ++use) {
    if (!ends_before(*use)) out.depends_on(use->task);
  }
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
  for (const LayerIndex l : touched.indices()) {
    touched[l].push_back(l);
    for (const int owner : layer(l).borrows) touched[l].push_back(LayerIndex(owner));
  }
  for (const SubgroupIndex s : subgroup_users.indices()) {
    IndexRange<SubgroupIndex>& range = subgroup_ranges[layer_of(subgroup(s))];
    if (range.empty()) range.first = s;
    range.past = s + 1;
  }
}

Task& LoweringState::emit(TaskList& out, TaskKind kind, Lane lane, int priority, LayerIndex of) {
  Task task;
  task.priority = priority;
  task.layer = of;
  task.step = step;
  return emit_like(out, task, kind, lane);
}

}  // namespace tandem
