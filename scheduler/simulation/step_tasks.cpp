#include "scheduler/simulation/step_tasks.hpp"

namespace tandem {
namespace {

/// A task that brings a layer's weights to the device: of a layer use, however many micro-batches pass in it.
bool brings_weights(TaskKind kind) noexcept {
  return kind == TaskKind::fetch_weights || kind == TaskKind::encode_weights || kind == TaskKind::decode_weights;
}

/// A layer's, not in pieces.
bool goes_whole(TaskKind kind) noexcept {
  return brings_weights(kind) || kind == TaskKind::gather_weights || kind == TaskKind::all_to_all_gradient;
}

}  // namespace

void StepTasks::restart(TaskId first) {
  first_id_ = first;
  graph_.restart(first);
}

void StepTasks::submit(const Action& stands_for) {
  submitted_ += static_cast<std::int64_t>(emitted_.size());
  pending_ += static_cast<std::int64_t>(emitted_.size());
  for (std::size_t i = 0; i < emitted_.size(); ++i) {
    if (is_update(emitted_[i].kind)) ++pending_updates_;
    graph_.add(emitted_[i], emitted_.dependencies(i));
  }
  if (coarseness_.stand_for_several) {
    for (const Task& task : emitted_) {
      times_.push_back(brings_weights(task.kind) ? 1.0 : stands_for.micro_batches);
    }
  }
  emitted_.clear();
}

void StepTasks::done(TaskId id) {
  --pending_;
  if (is_update(graph_.node(id).task.kind)) --pending_updates_;
  graph_.mark_done(id);
}

double StepTasks::times(const Task& task) const {
  const auto index = static_cast<std::size_t>(task.id - first_id_);
  return index < times_.size() ? times_[index] : 1.0;
}

TaskCost StepTasks::begin(const Task& task) {
  if (task.kind == TaskKind::speculate) {
    if (task.step <= closed_step_) return {};
    updated_ahead_[task.subgroup] = true;
  } else if (task.kind == TaskKind::update_cpu && updated_ahead_[task.subgroup]) {
    updated_ahead_[task.subgroup] = false;
    return {};
  }
  return cost_of(task);
}

TaskCost StepTasks::cost_of(const Task& task) const {
  const std::int64_t of_pieces = coarseness_.piece;
  if (of_pieces == 0 && !coarseness_.stand_for_several) return costs_.of(task, coarseness_.sums);
  const std::int64_t piece = takes_subgroup_whole(task) ? plan_.subgroup_size : of_pieces;
  const std::int64_t pieces = of_pieces == 0 || goes_whole(task.kind) ? 1 : (task.count() + piece - 1) / piece;
  TaskCost cost = costs_.of(task, coarseness_.sums, static_cast<double>(pieces));
  cost.seconds *= times(task);
  return cost;
}

}  // namespace tandem
