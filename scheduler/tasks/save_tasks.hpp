#pragma once
// A save among the tasks of a plan.
#include <cstdint>

#include "core/params/parameter_layout.hpp"
#include "scheduler/tasks/lowering_state.hpp"

namespace tandem {

/// Emits the reading of all state, in the order of a checkpoint, behind the updates emitted so far.
class SaveTasks {
 public:
  /// The state must outlive it.
  explicit SaveTasks(LoweringState& state) : state_(state) {}
  void save(TaskList& out);

 private:
  void save_parameter(const Parameter& parameter, TaskList& out);
  void save_trained(const Parameter& parameter, std::int64_t begin, std::int64_t end, TaskList& out);
  TaskId emit(const Parameter& parameter, StateArray array, std::int64_t begin, std::int64_t end, TaskList& out);

  LoweringState& state_;
  TaskId last_ = no_task;
};

}  // namespace tandem
