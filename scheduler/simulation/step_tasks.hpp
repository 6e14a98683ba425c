#pragma once
// Tasks of a simulated step: what they cost, and how many are not done.
#include <cstdint>
#include <vector>

#include "scheduler/machine/cost_model.hpp"
#include "scheduler/plan/plan.hpp"
#include "scheduler/plan/walk.hpp"
#include "scheduler/simulation/simulator.hpp"
#include "scheduler/tasks/task_graph.hpp"

namespace tandem {

/// Coarseness of the simulated tasks: what they stand for.
struct Coarseness {
  bool sums = false;               ///< several gradients of a layer add up in a step
  bool stand_for_several = false;  ///< some micro-batches do
  std::int64_t piece = 0;          ///< elements of the pieces that a coarse piece is made of; 0: nothing is coarsened
};

/// Passes what a lowering emits on to the task graph.
class StepTasks {
 public:
  /// All but `coarseness` must outlive it.
  StepTasks(const Plan& plan, const CostModel& costs, const Coarseness& coarseness, SimulationMemory& memory)
      : plan_(plan), costs_(costs), coarseness_(coarseness), graph_(memory.graph), emitted_(memory.tasks), updated_ahead_(plan.subgroups.size()) {}

  /// List that the lowering appends its tasks to.
  TaskList& emitted() noexcept { return emitted_; }
  TaskGraph& graph() noexcept { return graph_; }
  const TaskGraph& graph() const noexcept { return graph_; }
  /// Begins anew with the task of this id.
  void restart(TaskId first);
  /// Submits the tasks that an action, or an update, has emitted.
  void submit(const Action& stands_for = {});
  void done(TaskId id);
  std::int64_t pending() const noexcept { return pending_; }  ///< tasks that are not done
  std::int64_t pending_updates() const noexcept { return pending_updates_; }
  std::int64_t submitted() const noexcept { return submitted_; }  ///< tasks altogether

  /// How many a task stands for.
  double times(const Task& task) const;
  /// Begins a task, and returns what it costs. An update that begins before the norm is known is never taken back; it costs
  /// nothing later, and one that comes too late nothing at all.
  TaskCost begin(const Task& task);
  /// A task's cost, whatever has run before it. A coarse piece costs what its pieces would, each with its launch or latency.
  TaskCost cost_of(const Task& task) const;
  /// The norm of a step is known (`Task::step`).
  void close_step(std::int64_t step) noexcept { closed_step_ = step; }

 private:
  const Plan& plan_;
  const CostModel& costs_;
  const Coarseness coarseness_;
  TaskGraph& graph_;
  TaskList& emitted_;
  TaskId first_id_{0};
  /// Whether the update of each has begun before the norm was known.
  IndexedVector<SubgroupIndex, bool> updated_ahead_;
  std::int64_t closed_step_ = -1;
  std::vector<double> times_;  ///< tasks that each task stands for, where micro-batches are coarsened
  std::int64_t pending_ = 0;
  std::int64_t pending_updates_ = 0;
  std::int64_t submitted_ = 0;
};

}  // namespace tandem
